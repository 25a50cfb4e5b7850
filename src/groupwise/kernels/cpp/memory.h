// Scratch memory of the kernels.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

struct Free {
    void *whole = nullptr;  // what malloc returned
    void operator()(void *) const { std::free(whole); }
};

template <typename T>
using Memory = std::unique_ptr<T[], Free>;

// Memory that starts on a cache line, without content; null when there is none. Not from aligned_alloc: what it
// leaves free is too small for the next buffer of its own size, before glibc 2.38, and the heap grows.
template <typename T>
Memory<T> memory_of(int64_t size)
{
    constexpr int64_t LINE = 64;
    void *whole = std::malloc(std::max<int64_t>(size, 1) * sizeof(T) + LINE);
    const uintptr_t end = (uintptr_t)whole + LINE;
    return Memory<T>(whole ? (T *)(end - end % LINE) : nullptr, Free{whole});
}

}  // namespace
