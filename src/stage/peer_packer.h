/*
 * peer_packer.h: packs adapters for those that will load them from a peer: the images, their seals
 * and what is said of them in lists. It is the other end of source_peer.h's images.
 */
#ifndef SP_STAGE_PEER_PACKER_H
#define SP_STAGE_PEER_PACKER_H

#include "peer/peer_content.h"

#include <sidepath/pool.h>

/*
 * A packer for pools of this layout, which is borrowed as long as the packer is used. Adapters must
 * have been opened against the layout's geometry. Those that replace rows are SP_ERR_UNSUPPORTED:
 * an image does not hold all of them; so are those without any effect, which not every server
 * allows. Else what sp_layout_pack returns. Any thread.
 */
sp_peer_packer sp_peer_packer_for(const sp_layout *layout);

#endif
