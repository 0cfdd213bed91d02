/*
 * Lets User-Mode Linux 6.1 run on processors whose register state is larger than its own buffer.
 *
 * UML saves and restores a guest's extended registers with PTRACE_{GET,SET}REGSET(NT_X86_XSTATE) and a buffer of
 * 2,696 bytes (arch/x86/um, FP_SIZE): all states up to PKRU. Where the processor has AMX the kernel's state is
 * 11,008 bytes; it takes a partial buffer for reading but answers EFAULT to a partial one for writing, and the guest
 * dies at its first instruction. Preloaded, this widens the buffer on the way in and narrows it on the way out. No
 * state is lost: a guest cannot get AMX, because UML's arch_prctl knows no ARCH_REQ_XCOMP_PERM.
 *
 * UML writes the registers back after every system call of a guest, nearly always those it has just read. Such a write
 * is left out: the process has stood still since the read.
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
    static size_t full_size;                    /* constant on a machine, learned at the first read */
    static char wide[WIDE], last[WIDE];         /* UML is one thread where it drives guests */
    static int last_pid;
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
    size_t size = narrow->iov_len;
    struct iovec full = {wide, WIDE};
    if (request == PTRACE_GETREGSET) {
        last_pid = 0;
        if (next(PTRACE_GETREGSET, pid, address, &full) < 0)
            return -1;
        full_size = full.iov_len;
        if (size > full_size)
            size = narrow->iov_len = full_size;
        memcpy(narrow->iov_base, wide, size);
        memcpy(last, wide, size);
        last_pid = pid;
        return 0;
    }
    int unchanged = pid == last_pid && memcmp(last, narrow->iov_base, size) == 0;
    last_pid = 0;
    if (unchanged)
        return 0;
    if (size >= full_size)
        return next(request, pid, address, data);
    memset(wide + size, 0, full_size - size);
    memcpy(wide, narrow->iov_base, size);
    unsigned long long features;
    memcpy(&features, wide + XFEATURES_AT, sizeof features);
    features &= NARROW_FEATURES;
    memcpy(wide + XFEATURES_AT, &features, sizeof features);
    full.iov_len = full_size;
    return next(PTRACE_SETREGSET, pid, address, &full);
}
