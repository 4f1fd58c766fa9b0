// A store after a change that failed: what is known again before anything is built on it. See
// store.h, invariant 5.
#include "store.h"

namespace lightckpt {

// What the media itself says is gone stays gone.
Status Store::keep_lost(Status status) {
  if (status.code() == Code::kLost && failed_.ok()) failed_ = status;
  return status;
}

// Called by begin and rebase before anything else; there is nothing to do but after a failure.
//
// What may have failed is a drain, whose ranges then may have reached the media or not, or a page,
// whose stores went to one that is nobody's. Each failure has ended the call that met it, since no
// drain and no check succeeds between it and this. So, by which call that was:
//
//   commit, before its slot    No slot names the attempt. Its area and manifest are free, and share
//                              no page with those of a version.
//   commit, its slot           What the slot names was drained and checked before. So the slot may
//                              stand or not: if it is seen now it becomes a version, whole, late.
//   begin, retiring            Nothing has been written where these versions lie, and nothing is
//                              until a later begin has retired them. So each may stand or not.
//   rebase, its slot           It names what an older slot names, which still stands.
//   a batch, or begin's end    As before the slot.
//
// So any mixture of slots as they were before and after the call is one that a crash might have
// left, and every version that is seen is whole. All that is needed is that no two looks differ:
// what is seen now is stored again, every slot, and drained. A page that was written back in vain
// counts as clean and may later be read as it was before, so flushing it would not do. A manifest
// that versions share is drained with the first of them, before a slot names it, and not written
// again. Until this has succeeded, no attempt begins.
Status Store::repair() {
  if (!in_doubt_ && !media_->shaken()) return {};
  in_doubt_ = true;
  RETURN_IF_ERROR(keep_lost(media_->recover()));
  RETURN_IF_ERROR(keep_lost(scan()));
  std::vector<Slot> lines(header_.slot_count);
  for (const Version& version : versions_) lines[version.index] = version.slot;
  RETURN_IF_ERROR(keep_lost(catalog_->rewrite(lines)));
  RETURN_IF_ERROR(keep_lost(media_->check()));
  in_doubt_ = false;
  return {};
}

}  // namespace lightckpt
