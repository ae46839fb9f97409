/*
 * faulty_device.h: makes an open device fail at the n-th call that moves bytes or waits for them.
 * What fails has done half of its work. One device at a time.
 */
#ifndef SP_TEST_SUPPORT_FAULTY_DEVICE_H
#define SP_TEST_SUPPORT_FAULTY_DEVICE_H

#include <sidepath/device.h>

#include <stdbool.h>

void faulty_device_wrap(sp_device *device);

/* Of a column that fails nothing arrives, not half. */
void faulty_device_lose_columns(bool whole);

/* Lets `n` more calls succeed and fails the one after, once; -1 switches it off. */
void faulty_device_fail_after(int64_t n);
bool faulty_device_failed(void); /* since it was set */

#endif
