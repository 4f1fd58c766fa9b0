// Making and opening stores: the only part of a store that deals in paths. See store.h.
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "file_media.h"
#include "store.h"

namespace lightckpt {
namespace {

constexpr uint64_t kSmallStore = 64 * 1024;

Status sync_folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
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

Status format(Media* media, const StoreOptions& options) {
  uint64_t store_id = 0;
  if (getrandom(&store_id, sizeof(store_id), 0) != sizeof(store_id)) return from_errno("getrandom");
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

// A device has no empty state but this. Slots of an older store beyond it carry that one's id. A
// crash while it is formatted may leave a header whose checksum is wrong; only zeros undo that.
bool is_blank(const Media& media, uint32_t slots) {
  const Bytes header(media.view(), kPageBytes);
  return media.size() >= heap_offset(slots) + kSmallStore &&
         std::ranges::all_of(header, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

Status Store::create(const std::string& path, const StoreOptions& options,
                     std::unique_ptr<Media>* media) {
  // Under another name until it is whole, so that a crash here leaves no half-made store. The
  // writer's lock is held: nobody else uses this name.
  const std::string unfinished = path + ".tmp";
  unlink(unfinished.c_str());
  const uint64_t least = heap_offset(options.slots) + kSmallStore;
  const uint64_t bytes = std::max(least, round_up(options.bytes, kPageBytes));
  RETURN_IF_ERROR(FileMedia::create(unfinished, options.media, bytes, media));
  Status status = format(media->get(), options);
  Header header;
  if (status.ok()) status = decode_header(**media, &header);
  if (status.ok()) status = create_catalog(path, header);
  if (status.ok() && rename(unfinished.c_str(), path.c_str()) != 0) {
    status = from_errno("cannot rename " + unfinished);
  }
  (*media)->set_path(path);
  if (status.ok() && (*media)->granularity() != Granularity::kVolatile) {
    status = sync_folder_of(path);
  }
  if (!status.ok()) unlink(unfinished.c_str());
  return status;
}

Status Store::open(const std::string& path, const StoreOptions& options,
                   std::unique_ptr<Store>* store) {
  if (options.media == MediaKind::kHeap) {
    const uint64_t bytes = std::max(options.bytes, heap_offset(options.slots) + kSmallStore);
    return open(std::make_unique<HeapMedia>(bytes, bytes), options, true, store);
  }
  std::unique_ptr<Store> opened(new Store());
  struct stat file = {};
  const bool exists = stat(path.c_str(), &file) == 0;
  if (exists && S_ISDIR(file.st_mode)) {
    return {Code::kInvalid, path + " is a directory; a store is a file"};
  }
  if (!exists && errno != ENOENT) return from_errno("cannot look at " + path);
  if (!exists && (!options.create || options.read_only)) {
    return {Code::kNotFound, "there is no store at " + path};
  }
  std::unique_ptr<Media> media;
  if (options.read_only) {
    // Before the lock file is made: looking at a foreign file must leave nothing beside it.
    RETURN_IF_ERROR(FileMedia::open(path, options.media, true, &media));
    if (Status status = decode_header(*media, &opened->header_); !status.ok()) {
      return {status.code(), path + ": " + status.message()};
    }
  }
  RETURN_IF_ERROR(opened->lock_.acquire(path, !options.read_only));
  if (media != nullptr) {
    // A reader's, opened above.
  } else if (exists || stat(path.c_str(), &file) == 0) {
    RETURN_IF_ERROR(FileMedia::open(path, options.media, options.read_only, &media));
    if (options.create && S_ISCHR(file.st_mode) && is_blank(*media, options.slots)) {
      if (catalog_of(options) != CatalogKind::kLines) {
        return {Code::kInvalid, path + " is a device: there is no place for a catalog beside it"};
      }
      RETURN_IF_ERROR(format(media.get(), options));
    }
  } else {
    RETURN_IF_ERROR(create(path, options, &media));
  }
  opened->media_ = std::move(media);
  if (Status status = opened->start(path, options); !status.ok()) {
    return {status.code(), path + ": " + status.message()};
  }
  if (const uint64_t count = opened->unsafe_shutdowns(); count > 0) {
    for (Version& version : opened->versions_) {
      if (version.damage.ok()) continue;
      version.damage = {version.damage.code(), version.damage.message() + "; its media has had " +
                                                   std::to_string(count) +
                                                   " unsafe shutdowns since the store was made"};
    }
  }
  *store = std::move(opened);
  return {};
}

Status Store::start(const std::string& path, const StoreOptions& options) {
  read_only_ = options.read_only;
  RETURN_IF_ERROR(decode_header(*media_, &header_));
  if (catalog_ == nullptr) RETURN_IF_ERROR(open_catalog(path, options));
  RETURN_IF_ERROR(scan());
  return read_only_ ? Status() : settle_slots();
}

Status Store::open_catalog(const std::string& path, const StoreOptions& options) {
  const auto kind = static_cast<CatalogKind>(header_.catalog);
  if (options.catalog && *options.catalog != kind) {
    return {Code::kInvalid, kind == CatalogKind::kLines
                                ? "the store has its slots in itself, not in a pmemobj catalog"
                                : "the store has its slots in a pmemobj catalog, not in itself"};
  }
  return lightckpt::open_catalog(path, header_, media_.get(), &catalog_);
}

// Reads every slot and the manifests they reach.
Status Store::scan() {
  RETURN_IF_ERROR(decode_header(*media_, &header_));
  versions_.clear();
  for (uint32_t index = 0; index < header_.slot_count; ++index) {
    Version version;
    version.index = index;
    if (!read_slot(index, &version.slot)) continue;
    version.damage = read_manifest(&version);
    // What a reader does not find may lie where the writer has grown the store since.
    if (!version.damage.ok() && read_only_ && media_->follow()) {
      version.damage = read_manifest(&version);
    }
    versions_.push_back(std::move(version));
  }
  for (Version& version : versions_) {
    if (version.layout == nullptr) version.layout = std::make_shared<Layout>();
  }
  sort_versions();
  return media_->check();
}

// Versions of one structure share their manifest: it is read once, and its layout held once, or a
// store whose slots all name one large manifest would take many times its size in memory, and time.
Status Store::read_manifest(Version* version) const {
  const Slot& slot = version->slot;
  const auto same = std::ranges::find_if(versions_, [&](const Version& other) {
    return other.slot.manifest_offset == slot.manifest_offset &&
           other.slot.manifest_bytes == slot.manifest_bytes &&
           other.slot.manifest_crc == slot.manifest_crc;
  });
  if (same == versions_.end()) {
    auto layout = std::make_shared<Layout>();
    Bytes manifest;
    if (Status status = catalog_->manifest(slot, &manifest); !status.ok()) {
      return damaged(slot, status.message());
    }
    RETURN_IF_ERROR(decode_manifest(*media_, slot, manifest, layout.get(), &version->blob));
    version->layout = std::move(layout);
  } else if (same->layout == nullptr) {
    return damaged(slot, "it shares the manifest of " + same->damage.message());
  } else {
    version->layout = same->layout;
    version->blob = same->blob;
  }
  return check_place(*media_, header_, slot, *version->layout);
}

// A process that was killed may have left slots that every process sees and a crash would still
// take away: a version that the next begin relies on, or one retired whose bytes it overwrites.
// This drain makes what scan has seen durable before anything builds on it.
Status Store::settle_slots() {
  RETURN_IF_ERROR(catalog_->settle());
  return media_->check();
}

bool Store::read_slot(uint32_t index, Slot* slot) const {
  *slot = catalog_->line(index);
  return is_slot(header_, *slot);
}

uint64_t Store::unsafe_shutdowns() const {
  const std::optional<uint64_t> now = media_->unsafe_shutdowns();
  const uint64_t before = header_.shutdowns;
  return now && before != 0 && *now + 1 > before ? *now + 1 - before : 0;
}

Status Store::open(std::unique_ptr<Media> media, const StoreOptions& options, bool format_it,
                   std::unique_ptr<Store>* store, std::unique_ptr<Catalog> catalog) {
  std::unique_ptr<Store> opened(new Store());
  opened->media_ = std::move(media);
  opened->catalog_ = std::move(catalog);
  if (format_it) RETURN_IF_ERROR(format(opened->media_.get(), options));
  RETURN_IF_ERROR(opened->start("", options));
  *store = std::move(opened);
  return {};
}

}  // namespace lightckpt
