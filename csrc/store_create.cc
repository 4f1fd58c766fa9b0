// Making a store: under another name until it is whole, so that a crash leaves no half-made one;
// then given its name, which must be free: whoever comes second never replaces the first one's
// store. See store.h.
#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "file_media.h"
#include "store.h"

namespace lightckpt {
namespace {

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

Status sync_folder_of(const std::string& path) {
  const std::string folder = folder_of(path);
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  const int fd = uninterrupted([&] { return ::open(folder.c_str(), kFlags); });
  if (fd < 0) return from_errno("cannot open " + folder);
  const int result = uninterrupted([&] { return fsync(fd); });
  Status status = result == 0 ? Status() : from_errno("fsync of " + folder);
  close(fd);
  return status;
}

CatalogKind catalog_of(const StoreOptions& options) {
  return options.catalog.value_or(CatalogKind::kLines);
}

Status random_number(uint64_t* number) {
  if (getrandom(number, sizeof(*number), 0) != sizeof(*number)) return from_errno("getrandom");
  return {};
}

// Is this file what a process that was killed here has left of a new store? That holds no version:
// it is zeros, or a header and slots that are. Anything else of this name is somebody's.
bool is_unfinished(const std::string& name) {
  const int fd = ::open(name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return false;
  std::vector<std::byte> head(heap_offset(kSlotsMax));
  struct stat file = {};
  const bool whole = fstat(fd, &file) == 0 && S_ISREG(file.st_mode) &&
                     file.st_size >= static_cast<off_t>(heap_offset(kSlotsMin));
  const ssize_t bytes = whole ? pread(fd, head.data(), head.size(), 0) : -1;
  close(fd);
  if (bytes <= 0) return whole && bytes == 0;
  head.resize(static_cast<size_t>(bytes));
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  const bool named = std::memcmp(head.data(), "LIGHTCKP", 8) == 0;
  return std::all_of(head.begin() + (named ? kPageBytes : 0), head.end(), is_zero);
}

// Whoever holds the lock file has PATH.tmp to himself, and removes what a crash left there. Nobody
// else may touch that: it may be a store that somebody is making.
Status unfinished_name(const std::string& path, bool holds_name, std::string* name) {
  *name = path + ".tmp";
  if (holds_name && access(name->c_str(), F_OK) != 0 && errno == ENOENT) return {};
  if (holds_name && is_unfinished(*name) && unlink(name->c_str()) == 0) return {};
  uint64_t number = 0;
  RETURN_IF_ERROR(random_number(&number));
  *name = folder_of(path) + ".lightckpt." + std::to_string(number) + ".tmp";
  return {};
}

// Some file systems know no rename that keeps what is there, but all of these know links.
int give_name(const std::string& unfinished, const std::string& path) {
  if (renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0) {
    return 0;
  }
  if (errno != EINVAL && errno != ENOSYS) return errno;
  if (link(unfinished.c_str(), path.c_str()) != 0) return errno;
  unlink(unfinished.c_str());
  return 0;
}

}  // namespace

Status Store::format(Media* media, const StoreOptions& options) {
  uint64_t store_id = 0;
  RETURN_IF_ERROR(random_number(&store_id));
  struct timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  const uint64_t created = uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
  const uint64_t shutdowns = media->unsafe_shutdowns() ? *media->unsafe_shutdowns() + 1 : 0;
  const Header header = encode_header(store_id | 1, options.slots, created, shutdowns,
                                      static_cast<uint32_t>(catalog_of(options)));
  media->store(0, std::as_bytes(std::span(&header, 1)));
  media->flush(0, sizeof(header));
  return media->drain();
}

Status Store::format_device(const std::string& path, const StoreOptions& options) {
  // A device has no empty state but this. Slots of an older store beyond it carry that one's id. A
  // crash while it is formatted may leave a header whose checksum is wrong; only zeros undo that.
  const Bytes header(media_->view(), std::min(media_->size(), kPageBytes));
  if (media_->size() < least_bytes(options) ||
      !std::ranges::all_of(header, [](std::byte byte) { return byte == std::byte{0}; })) {
    return {};
  }
  if (catalog_of(options) != CatalogKind::kLines) {
    return {Code::kInvalid, path + " is a device: there is no place for a catalog beside it"};
  }
  return format(media_.get(), options);
}

Status Store::create(const std::string& path, const StoreOptions& options, bool holds_name,
                     bool* made) {
  *made = false;
  const bool in_pool = catalog_of(options) == CatalogKind::kPmemobj;
  if (in_pool && !holds_name) {
    // The pool's name is fixed: two that make it at once would mix their stores.
    return {Code::kAccess, "a store with its catalog beside it is made under the lock file " +
                               path + ".lock, which cannot be had"};
  }
  std::string unfinished;
  RETURN_IF_ERROR(unfinished_name(path, holds_name, &unfinished));
  const uint64_t bytes = std::max(least_bytes(options), round_up(options.bytes, kPageBytes));
  std::unique_ptr<Media> media;
  RETURN_IF_ERROR(FileMedia::create(unfinished, options.media, bytes, &media));
  media_ = std::move(media);
  Status status = format(media_.get(), options);
  Header header;
  if (status.ok()) status = decode_header(*media_, &header);
  if (status.ok()) status = create_catalog(path, header);
  // Before it can be found, so that nobody else comes first.
  if (status.ok()) status = lock_.open(unfinished, true);
  const int error = status.ok() ? give_name(unfinished, path) : 0;
  *made = status.ok() && error == 0;
  if (*made) {
    media_->set_path(path);
    lock_.set_path(path);
    return media_->granularity() == Granularity::kVolatile ? Status() : sync_folder_of(path);
  }
  unlink(unfinished.c_str());
  // Somebody else made it meanwhile: that one is the store.
  if (!status.ok() || error == EEXIST) return status;
  return from_errno("cannot rename " + unfinished, error);
}

}  // namespace lightckpt
