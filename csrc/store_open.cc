// Opening stores: the only part of a store that deals in paths. See store.h.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "file_media.h"
#include "holder.h"
#include "store.h"

namespace lightckpt {
namespace {

constexpr uint64_t kSmallStore = 64 * 1024;
constexpr int kLinksMax = 40;  // as the kernel has it
constexpr int kOpensMax = 8;   // of a path whose file is replaced again and again

// Do both names lead to one file? It may be replaced between two looks, so there are some.
bool is_same_file(const std::string& a, const std::string& b) {
  if (a == b) return true;
  for (int i = 0; i < kOpensMax; ++i) {
    struct stat one, other;
    if (stat(a.c_str(), &one) == 0 && stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev &&
        one.st_ino == other.st_ino) {
      return true;
    }
  }
  return false;
}

// Links of /proc lead to files, not to names: another file may have that name here, or none.
Status nameless(const std::string& path) {
  return {Code::kInvalid, path + " leads to a file that has no name here: it is of another mount " +
                              "namespace, or was removed"};
}

// The store's own name: all links are followed, the last one even if there is nothing where it
// points, since that is where the store is to be made.
Status resolve(const std::string& path, std::string* real) {
  if (path.empty()) return {Code::kInvalid, "the path of a store is empty"};
  std::string at = path;
  bool is_nameless = false;
  for (int links = 0; links < kLinksMax; ++links) {
    char* resolved = realpath(at.c_str(), nullptr);
    if (resolved != nullptr) {
      *real = resolved;
      std::free(resolved);
      return is_same_file(at, *real) ? Status() : nameless(path);
    }
    if (errno == ELOOP) break;
    if (errno != ENOENT) return from_errno("cannot look at " + path);
    struct stat file;
    if (stat(at.c_str(), &file) == 0) {
      is_nameless = true;  // or it has just been made: looked at again
      continue;
    }
    const size_t slash = at.rfind('/');
    const std::string name = slash == std::string::npos ? at : at.substr(slash + 1);
    resolved =
        realpath(slash == std::string::npos ? "." : at.substr(0, slash + 1).c_str(), nullptr);
    if (resolved == nullptr) return from_errno("cannot look into the folder of " + path);
    const std::string folder = std::string(resolved) + "/";
    std::free(resolved);
    if (!is_same_file(slash == std::string::npos ? "." : at.substr(0, slash + 1), folder)) {
      return nameless(path);
    }
    std::string target(4096, '\0');
    const ssize_t bytes = readlink((folder + name).c_str(), target.data(), target.size());
    if (bytes < 0) {
      *real = folder == "//" ? "/" + name : folder + name;
      return {};
    }
    target.resize(static_cast<size_t>(bytes));
    at = target.front() == '/' ? target : folder + target;
  }
  if (is_nameless) return nameless(path);
  return {Code::kInvalid, path + " is a loop of symbolic links"};
}

Status check_kind(const std::string& path, const struct stat& file) {
  if (S_ISDIR(file.st_mode)) return {Code::kInvalid, path + " is a directory; a store is a file"};
  if (S_ISREG(file.st_mode) || S_ISCHR(file.st_mode)) return {};
  return {Code::kInvalid, path + " is neither a file nor a device DAX node"};
}

Token token_in(const Media& media) {
  Token token = {};
  if (media.size() >= kPageBytes) std::memcpy(&token, media.view() + kTokenOffset, sizeof(token));
  return token;
}

}  // namespace

uint64_t Store::least_bytes(const StoreOptions& options) {
  return heap_offset(options.slots) + kSmallStore;
}

// Who is in the way of a writer: as the kernel says where it does, else as that one says in the
// store, or in the lock file of one that is not there yet or no more.
Status Store::busy(const std::string& path, MediaKind kind) const {
  const std::string open_in = path + " is already open for writing in ";
  if (const pid_t pid = lock_.holder_pid(); pid != 0) {
    return {Code::kBusy, open_in + "process " + std::to_string(pid)};
  }
  Token token = {}, of_name = {};
  struct stat file = {};
  uint64_t inode = 0;
  std::unique_ptr<Media> media;
  if (stat(path.c_str(), &file) == 0 && FileMedia::open(path, kind, true, &media).ok()) {
    token = token_in(*media);
  }
  if (holder_of(token, file.st_ino) != Holder::kLives &&
      holder_of_lock_file(path + ".lock", &of_name, &inode) == Holder::kLives) {
    return {Code::kBusy, open_in + words_of(of_name, inode)};
  }
  return {Code::kBusy, open_in + words_of(token, file.st_ino)};
}

// Says in the store that this handle writes it. Where a reader is in the way of the lock, whoever
// says so there already and lives is another writer.
Status Store::claim() {
  const Token before = token_in(*media_);
  const Holder holder = holder_of(before, lock_.inode());
  // Where the lock file cannot tell either, one that is not seen from here may be writing as well.
  if (!lock_.alone() &&
      (holder == Holder::kLives ||
       (holder == Holder::kElsewhere && !lock_.holds_name() && is_of_this_boot(before)))) {
    return {Code::kBusy, "it is already open for writing in " + words_of(before, lock_.inode())};
  }
  RETURN_IF_ERROR(make_token(lock_.inode(), &token_));
  media_->store(kTokenOffset, std::as_bytes(std::span(&token_, 1)));
  return {};
}

bool Store::holds_token() const {
  return std::memcmp(media_->view() + kTokenOffset, &token_, sizeof(token_)) == 0;
}

Store::~Store() {
  if (token_.nonce == 0 || !holds_token()) return;
  const Token none = {};
  media_->store(kTokenOffset, std::as_bytes(std::span(&none, 1)));
}

// With the mutex held. Before anything is published or retired: is this still the store that has
// its name, and this handle its writer?
Status Store::check_hold() {
  if (!failed_.ok() || token_.nonce == 0) return failed_;
  if (!holds_token()) {
    // A page that is gone has no token either.
    RETURN_IF_ERROR(keep_lost(media_->check()));
    const Token now = token_in(*media_);
    if (holder_of(now, lock_.inode()) == Holder::kUnknown) {
      return failed_ = {Code::kLost,
                        "what this process wrote into the store to say that it writes it is gone: "
                        "the store was written over, or another process has had it meanwhile"};
    }
    return failed_ = {Code::kLost,
                      "another process has opened the store for writing, and has taken it over: " +
                          words_of(now, lock_.inode())};
  }
  Status status = lock_.check();
  if (status.code() == Code::kLost) failed_ = status;
  return status;
}

// Locks the file at `path` and opens it as media: the same file, though others may replace it.
Status Store::open_file(const std::string& path, const StoreOptions& options) {
  Status status = lock_.open(path, !options.read_only);
  if (status.code() == Code::kBusy) return busy(path, options.media);
  RETURN_IF_ERROR(status);
  std::unique_ptr<Media> media;
  RETURN_IF_ERROR(FileMedia::open(path, options.media, options.read_only, &media));
  media_ = std::move(media);
  if (lock_.is_of(media_->descriptor())) return {};
  return {Code::kBusy, path + " was replaced while it was being opened"};
}

Status Store::open_path(const std::string& path, const StoreOptions& options) {
  struct stat file = {};
  bool exists = stat(path.c_str(), &file) == 0;
  if (!exists && errno != ENOENT) return from_errno("cannot look at " + path);
  if (exists) RETURN_IF_ERROR(check_kind(path, file));
  if (!exists && (!options.create || options.read_only)) {
    return {Code::kNotFound, "there is no store at " + path};
  }
  bool holds_name = false;
  if (!options.read_only && !lock_.take_name(path, &holds_name).ok()) {
    return busy(path, options.media);
  }
  if (stat(path.c_str(), &file) != 0) {
    bool made = false;
    RETURN_IF_ERROR(create(path, options, holds_name, &made));
    if (made) return {};
  }
  RETURN_IF_ERROR(open_file(path, options));
  return options.create && S_ISCHR(file.st_mode) ? format_device(path, options) : Status();
}

Status Store::open(const std::string& path, const StoreOptions& options,
                   std::unique_ptr<Store>* store) {
  if (options.media == MediaKind::kHeap) {
    const uint64_t bytes = std::max(options.bytes, least_bytes(options));
    return open(std::make_unique<HeapMedia>(bytes, bytes), options, true, store);
  }
  std::unique_ptr<Store> opened;
  Status status;
  // What was met may be of a file that has just been replaced by another, as archives are.
  for (int i = 0; i < kOpensMax; ++i) {
    std::string real;
    RETURN_IF_ERROR(resolve(path, &real));
    opened.reset(new Store());
    status = opened->open_path(real, options);
    if (status.ok()) {
      status = opened->start(real, options);
      if (!status.ok()) status = {status.code(), path + ": " + status.message()};
    }
    if (status.ok() || opened->lock_.check().code() != Code::kLost) break;
  }
  RETURN_IF_ERROR(status);
  if (const uint64_t count = opened->unsafe_shutdowns(); count > 0) {
    const MutexLock lock(opened->mutex_);
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
  const MutexLock lock(mutex_);  // of nobody else's knowledge yet, but what is called here needs it
  read_only_ = options.read_only;
  RETURN_IF_ERROR(decode_header(*media_, &header_));
  if (!read_only_ && lock_.is_open()) RETURN_IF_ERROR(claim());
  if (catalog_ == nullptr) RETURN_IF_ERROR(open_catalog(path, options));
  RETURN_IF_ERROR(scan());
  return read_only_ ? Status() : secure_slots();
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
  std::vector<Version> seen;
  for (uint32_t index = 0; index < header_.slot_count; ++index) {
    Version version;
    version.index = index;
    if (!read_slot(index, &version.slot)) continue;
    version.damage = read_manifest(seen, &version);
    // What a reader does not find may lie where the writer has grown the store since.
    if (!version.damage.ok() && read_only_ && media_->follow()) {
      version.damage = read_manifest(seen, &version);
    }
    seen.push_back(std::move(version));
  }
  for (Version& version : seen) {
    if (version.layout == nullptr) version.layout = std::make_shared<Layout>();
  }
  RETURN_IF_ERROR(media_->check());  // else what was seen is not the media's
  versions_ = std::move(seen);
  sort_versions();
  return {};
}

// Versions of one structure share their manifest: it is read once, and its layout held once, or a
// store whose slots all name one large manifest would take many times its size in memory, and time.
Status Store::read_manifest(const std::vector<Version>& seen, Version* version) const {
  const Slot& slot = version->slot;
  const auto same = std::ranges::find_if(seen, [&](const Version& other) {
    return other.slot.manifest_offset == slot.manifest_offset &&
           other.slot.manifest_bytes == slot.manifest_bytes &&
           other.slot.manifest_crc == slot.manifest_crc;
  });
  if (same == seen.end()) {
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
  return check_area(*media_, header_, slot, *version->layout);
}

// A process that was killed may have left slots that every process sees and a crash would still
// take away: a version that the next begin relies on, or one retired whose bytes it overwrites.
// This drain makes what scan has seen durable before anything builds on it.
Status Store::secure_slots() {
  RETURN_IF_ERROR(catalog_->secure());
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
