// Asking what a device may reach, and registering part by part. See reach.h.
#include "reach.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace lightckpt {

Status may_reach(const CudaDriver& driver, int ordinal, bool read_only) {
  struct Need {
    CudaAttribute attribute;
    const char* why;
  };
  constexpr Need kNeeds[] = {
      {CudaAttribute::kHostPointers,
       "this GPU does not take host addresses of registered memory as its own: a copy there may "
       "fail when nobody looks, and lose the context"},
      {CudaAttribute::kRegistration, "host memory cannot be registered for this GPU"},
      {CudaAttribute::kReadOnlyRegistration,
       "the store is open for reading only, and such memory cannot be registered for this GPU"},
  };
  for (const Need& need : kNeeds) {
    if (need.attribute == CudaAttribute::kReadOnlyRegistration && !read_only) continue;
    int value = 0;
    RETURN_IF_ERROR(driver.device_attribute(ordinal, need.attribute, &value));
    if (value != 0) continue;
    return {Code::kIo, std::string(need.why) + " (its attribute " +
                           std::to_string(static_cast<int>(need.attribute)) + " is 0)"};
  }
  return {};
}

void Reach::extend(uint64_t bytes) {
  Status status = this->status();
  uint64_t from = pinned().bytes;
  while (status.ok() && from < bytes && !leaving_) {
    const uint64_t part = std::min(part_bytes_, bytes - from);
    try {
      status = add_part(from, part);
    } catch (const std::exception&) {
      status = no_host_memory();
    }
    from += part;
  }
  MutexLock lock(mutex_);
  if (!status.ok()) status_ = std::move(status);
}

Status Reach::add_part(uint64_t from, uint64_t bytes) {
  CudaRegistered part;
  auto borders = std::make_shared<std::vector<uint64_t>>();
  {
    MutexLock lock(mutex_);
    parts_.reserve(parts_.size() + 1);
    if (pinned_.borders != nullptr) *borders = *pinned_.borders;
    if (from > 0) borders->push_back(from);
  }
  RETURN_IF_ERROR(register_memory(context_, memory_ + from, bytes, read_only_, &part));
  MutexLock lock(mutex_);
  parts_.push_back(std::move(part));
  pinned_ = {memory_, from + bytes, std::move(borders)};
  return {};
}

Status Reach::status() const {
  MutexLock lock(mutex_);
  return status_;
}

CudaPinned Reach::pinned() const {
  MutexLock lock(mutex_);
  return pinned_;
}

Status Reach::reset() {
  std::vector<CudaRegistered> parts;
  {
    MutexLock lock(mutex_);
    parts.swap(parts_);
    pinned_ = {};
  }
  Status status;
  for (CudaRegistered& part : parts) {
    if (Status one = part.reset(); status.ok()) status = one;
  }
  return status;
}

}  // namespace lightckpt
