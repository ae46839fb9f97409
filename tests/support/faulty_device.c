#include "support/faulty_device.h"

#include "device/device_ops.h"

#include <stdatomic.h>

static const sp_device_ops *real;
static sp_device_ops faulty;
static atomic_llong countdown = -1;
static atomic_bool fired;

static bool must_fail(void)
{
    if (atomic_load(&countdown) < 0 || atomic_fetch_sub(&countdown, 1) != 0)
        return false;
    atomic_store(&fired, true);
    return true;
}

static sp_status write_half(sp_device *device, void *to, const void *from, size_t bytes)
{
    if (!must_fail())
        return real->write(device, to, from, bytes);
    real->write(device, to, from, bytes / 2);
    return SP_ERR_DEVICE;
}

static sp_status zero_half(sp_device *device, void *to, size_t bytes)
{
    if (!must_fail())
        return real->zero(device, to, bytes);
    real->zero(device, to, bytes / 2);
    return SP_ERR_DEVICE;
}

static sp_status wait_in_vain(sp_device *device, void *handle)
{
    sp_status status = real->stream_wait(device, handle);

    return must_fail() ? SP_ERR_DEVICE : status;
}

static sp_status copy_half(sp_device *device, void *handle, void *to, const void *from,
                           size_t bytes)
{
    if (!must_fail())
        return real->stream_copy(device, handle, to, from, bytes);
    real->stream_copy(device, handle, to, from, bytes / 2);
    return SP_ERR_DEVICE;
}

static sp_status stream_zero_half(sp_device *device, void *handle, void *to, size_t bytes)
{
    if (!must_fail())
        return real->stream_zero(device, handle, to, bytes);
    real->stream_zero(device, handle, to, bytes / 2);
    return SP_ERR_DEVICE;
}

static bool columns_whole; /* what fails of a column is all of it */

static sp_status copy_half_column(sp_device *device, void *handle, void *to, size_t to_stride,
                                  const void *from, size_t from_stride, size_t width, size_t height)
{
    bool fails = must_fail();
    sp_status status =
        real->stream_copy_column(device, handle, to, to_stride, from, from_stride, width,
                                 fails ? (columns_whole ? 0 : height / 2) : height);

    return fails ? SP_ERR_DEVICE : status;
}

void faulty_device_wrap(sp_device *device)
{
    real = device->ops;
    faulty = *real;
    faulty.write = write_half;
    faulty.zero = zero_half;
    faulty.stream_wait = wait_in_vain;
    faulty.stream_copy = copy_half;
    faulty.stream_zero = stream_zero_half;
    faulty.stream_copy_column = copy_half_column;
    device->ops = &faulty;
}

void faulty_device_lose_columns(bool whole)
{
    columns_whole = whole;
}

void faulty_device_fail_after(int64_t n)
{
    atomic_store(&fired, false);
    atomic_store(&countdown, n < 0 ? -1 : n);
}

bool faulty_device_failed(void)
{
    return atomic_load(&fired);
}
