/*
 * spin.h: the pause instruction for short spin-waits.
 */
#ifndef SP_BASE_SPIN_H
#define SP_BASE_SPIN_H

/* Tells the CPU that this is a spin-wait loop: saves power and leaves more of the core to its other
 * hyperthread. */
static inline void sp_spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("pause" ::: "memory");
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

#endif
