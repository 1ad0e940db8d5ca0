// Huge pages for newly allocated memory: the first access to a page of 4 KiB costs as much as computing with it.
#include "kernels.h"

#include <sys/mman.h>

extern "C" void advise_huge_pages(char* data, long bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t size = uintptr_t(1) << 21;
    const uintptr_t from = (reinterpret_cast<uintptr_t>(data) + size - 1) & ~(size - 1);
    const uintptr_t to = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) & ~(size - 1);
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // only advice: if it is not granted, nothing changes
#else
    (void)data, (void)bytes;  // Linux only
#endif
}
