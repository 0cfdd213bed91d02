/*
 * Lets User-Mode Linux 6.1 run on processors whose register state is larger than its own buffer.
 *
 * UML saves and restores a guest's extended registers with PTRACE_{GET,SET}REGSET(NT_X86_XSTATE) and a buffer of
 * 2,696 bytes (arch/x86/um, FP_SIZE): all states up to PKRU. Where the processor has AMX the kernel's state is
 * 11,008 bytes; it takes a partial buffer for reading but answers EFAULT to a partial one for writing, and the guest
 * dies at its first instruction. Preloaded, this widens the buffer on the way in and narrows it on the way out. No
 * state is lost: a guest cannot get AMX, because UML's arch_prctl knows no ARCH_REQ_XCOMP_PERM.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

enum { WIDE = 1 << 16, XFEATURES_AT = 512 };  /* XSTATE_BV: Intel SDM vol. 1, 13.4.2 */
#define NARROW_FEATURES 0x2ffull              /* x87 to PKRU, all that 2,696 bytes hold */

typedef long ptrace_function(int, ...);

long ptrace(enum __ptrace_request request, ...)
{
    static ptrace_function *next;
    static size_t full_size;  /* constant on a machine, learned at the first read */
    static __thread char wide[WIDE] __attribute__((aligned(64)));
    va_list arguments;
    va_start(arguments, request);
    int pid = va_arg(arguments, int);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);

    if (!next)
        next = (ptrace_function *)dlsym(RTLD_NEXT, "ptrace");
    if ((request != PTRACE_GETREGSET && request != PTRACE_SETREGSET) || (long)address != NT_X86_XSTATE)
        return next(request, pid, address, data);

    struct iovec *narrow = data;
    struct iovec full = {wide, WIDE};
    if (!full_size) {
        if (next(PTRACE_GETREGSET, pid, address, &full) < 0)
            return -1;
        full_size = full.iov_len;
    }
    if (full_size <= narrow->iov_len)
        return next(request, pid, address, data);
    if (request == PTRACE_GETREGSET) {
        long result = next(PTRACE_GETREGSET, pid, address, &full);
        memcpy(narrow->iov_base, wide, narrow->iov_len);
        return result;
    }
    full.iov_len = full_size;
    memset(wide, 0, full_size);
    memcpy(wide, narrow->iov_base, narrow->iov_len);
    unsigned long long features;
    memcpy(&features, wide + XFEATURES_AT, sizeof features);
    features &= NARROW_FEATURES;
    memcpy(wide + XFEATURES_AT, &features, sizeof features);
    return next(PTRACE_SETREGSET, pid, address, &full);
}
