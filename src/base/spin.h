/*
 * spin.h: what a thread does while it waits for another for a moment.
 */
#ifndef SP_BASE_SPIN_H
#define SP_BASE_SPIN_H

/* Tells the CPU that this is a waiting loop: it draws less power and leaves the core's other
 * thread more of it. */
static inline void sp_spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("pause" ::: "memory");
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

#endif
