#include "kernels/effective_scale.h"

#include <sidepath/route.h>

float sp_effective_scale(float stored_scale, float request_scale)
{
    return sp_scale_of_row(stored_scale, request_scale);
}
