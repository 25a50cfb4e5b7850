// Memory of torch's CPU tensors from malloc instead of posix_memalign.
//
// glibc before 2.38 cuts an aligned buffer out of a larger free one, so the hole that it leaves is
// too small for the next aligned buffer of its own size. Malloc finds such a hole at once.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::size_t ALIGNMENT = 64;  // that of torch's own allocator
// In front of a buffer stands what malloc returned.
constexpr std::size_t EXTRA = ALIGNMENT - 1 + sizeof(void*);

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(static_cast<void**>(data)[-1]);
}

struct Heap final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &release, cpu};
    void* whole = size > SIZE_MAX - EXTRA ? nullptr : std::malloc(size + EXTRA);
    TORCH_CHECK(whole != nullptr, "not enough memory: you tried to allocate ", size, " bytes.");
    const auto end = reinterpret_cast<std::uintptr_t>(whole) + EXTRA;
    void* data = reinterpret_cast<void*>(end & ~(ALIGNMENT - 1));
    static_cast<void**>(data)[-1] = whole;
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }
};

}  // namespace

// Tensors made from now on come from here; those that are there free their own memory. Never
// deleted, because some tensors live until the process ends.
extern "C" void use_heap() { c10::SetCPUAllocator(new Heap); }
