/*
 * A lower bound of a text's number of tokens, without encoding it: a text that is much too long is
 * refused at the cost of reading a part of it. A byte's share of its token is one over the token's
 * length, so the shares of a text add up to its tokens. The token of a byte is not known yet, but
 * it is a single byte, or it contains the byte together with the one before or after it, and the
 * longest token that has this pair is known. Its share is a lower bound.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/tokenizer/tokenizer_parts.h"

#include <string.h>

#define N_PAIRS 65536u
/* A token, in units of a share; the share of a token of one byte is a unit less. */
#define TOKEN_SHIFT 16
#define WHOLE       ((size_t)UINT16_MAX)
/*
 * NFC makes at least one byte of this many: U+1FBE U+0308 U+0301, of 7 bytes, become U+0390 of 2,
 * and nothing else shrinks as much; U+2581, of 3 bytes, becomes a blank. A blank in front of a text
 * never reduces the number of tokens.
 */
#define SHRINKS 4u

static size_t pair_at(const char *text)
{
    return (size_t)(unsigned char)text[0] << 8 | (unsigned char)text[1];
}

static void add_token(sp_tokenizer *tokenizer, const char *text, size_t bytes)
{
    uint16_t share = (uint16_t)(WHOLE / (bytes ? bytes : 1)); /* 0 for one of 64 KiB */

    for (size_t at = 0; at + 1 < bytes; at++)
        if (share < tokenizer->pair_share[pair_at(text + at)])
            tokenizer->pair_share[pair_at(text + at)] = share;
    if (share < tokenizer->least_share)
        tokenizer->least_share = share;
}

/* A dropped byte has share 0, and so have those next to it. */
static void add_dropped(sp_tokenizer *tokenizer, size_t byte)
{
    for (size_t other = 0; other < 256; other++) {
        tokenizer->pair_share[byte << 8 | other] = 0;
        tokenizer->pair_share[other << 8 | byte] = 0;
    }
    tokenizer->least_share = 0;
}

sp_status sp_bound_prepare(sp_tokenizer *tokenizer, sp_error *error)
{
    const size_t bytes = N_PAIRS * sizeof *tokenizer->pair_share;

    tokenizer->pair_share = sp_malloc(bytes);
    if (!tokenizer->pair_share)
        return sp_fail_memory(error, bytes, "the lengths of tokens");
    memset(tokenizer->pair_share, 0xff, bytes);
    tokenizer->least_share = UINT16_MAX;
    for (int32_t id = 0; id < tokenizer->n_ids; id++)
        add_token(tokenizer, tokenizer->token_data + tokenizer->token_begin[id],
                  tokenizer->token_begin[id + 1] - tokenizer->token_begin[id]);
    /* Once more, with the texts that are matched. */
    for (size_t i = 0; i < tokenizer->n_added; i++)
        add_token(tokenizer, tokenizer->added[i].content, tokenizer->added[i].bytes);
    for (size_t byte = 0; byte < 256; byte++)
        if (tokenizer->byte_id[byte] < 0)
            add_dropped(tokenizer, byte);
    return SP_OK;
}

/* The share of a byte without a neighbour. */
static uint16_t alone(const sp_tokenizer *tokenizer, char byte)
{
    return tokenizer->byte_id[(unsigned char)byte] < 0 ? 0 : UINT16_MAX;
}

static uint16_t share_at(const sp_tokenizer *tokenizer, const char *text, size_t bytes, size_t at)
{
    uint16_t left =
        at > 0 ? tokenizer->pair_share[pair_at(text + at - 1)] : alone(tokenizer, text[at]);
    uint16_t right =
        at + 1 < bytes ? tokenizer->pair_share[pair_at(text + at)] : alone(tokenizer, text[at]);

    return left < right ? left : right;
}

static bool is_ascii(const char *text, size_t bytes, size_t at)
{
    return at >= bytes || (unsigned char)text[at] < 0x80;
}

/* Whether normalising leaves this byte, and those next to it, as they are: an ASCII character
 * changes only where one that is not ASCII follows it. */
static bool is_kept(const char *text, size_t bytes, size_t at)
{
    return (at == 0 || is_ascii(text, bytes, at - 1)) && is_ascii(text, bytes, at) &&
           is_ascii(text, bytes, at + 1) && is_ascii(text, bytes, at + 2);
}

bool sp_bound_exceeds(const sp_tokenizer *tokenizer, const char *text, size_t bytes,
                      bool normalized, size_t n_max)
{
    const bool unchanged = normalized || !(tokenizer->nfc || tokenizer->metaspace);
    uint64_t sum = 0, most;

    if (bytes <= n_max)
        return false;
    most = (uint64_t)n_max << TOKEN_SHIFT; /* below `bytes`, which no memory has 2^48 of */
    for (size_t at = 0; at < bytes && sum <= most; at++)
        sum += unchanged || is_kept(text, bytes, at) ? share_at(tokenizer, text, bytes, at)
                                                     : tokenizer->least_share / SHRINKS;
    return sum > most;
}
