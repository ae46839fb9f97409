#include <sidepath/route.h>

float sp_effective_scale(float stored_scale, float request_scale)
{
    return (float)((double)stored_scale * (double)request_scale);
}
