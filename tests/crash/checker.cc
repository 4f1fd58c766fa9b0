// See checker.h.
#include "checker.h"

#include <algorithm>

namespace lightckpt {

Checker::Checker(const History& history, const Settings& settings, const See& see)
    : history_(history),
      settings_(settings),
      see_(see),
      hardware_(history.initial, history.model),
      recovery_(history.knowns, history.keep, history.catalog) {}

std::string Checker::first_broken(const History& history, const Settings& settings,
                                  uint64_t* images) {
  return first_broken(history, settings, images, See());
}

std::string Checker::first_broken(const History& history, const Settings& settings,
                                  uint64_t* images, const See& see) {
  Checker checker(history, settings, see);
  std::string what;
  for (size_t at = 0; at <= history.events.size() && what.empty(); ++at) {
    if (at >= settings.from && checker.is_point(at)) what = checker.crash(at);
    if (at < history.events.size()) checker.hardware_.apply(history.events[at]);
  }
  *images += checker.images_;
  return what;
}

bool Checker::is_point(size_t at) const {
  if (at == history_.events.size()) return true;
  const Event& event = history_.events[at];
  if (history_.model == Model::kOrder) return event.writes() || event.grows;
  return event.waits() || event.grows || event.atomic ||
         std::ranges::any_of(history_.promises, [&](const Promise& p) { return p.from == at; });
}

std::string Checker::crash(size_t at) {
  const bool ends = at == history_.events.size();
  std::mt19937_64 random(settings_.seed * 1'000'003 + at);
  pieces_ = hardware_.pieces(ends ? nullptr : &history_.events[at], random());
  chosen_.assign(pieces_.size(), 0);
  std::memcpy(recovery_.memory(), hardware_.durable().data(), hardware_.durable().size());
  recovery_.set_size(hardware_.durable().size());
  uint64_t combinations = 1;
  for (const ImagePiece& piece : pieces_) {
    combinations = std::min(combinations * piece.contents.size(), settings_.images_max + 1);
  }
  const Promise promise = history_.promise_at(at);
  if (history_.model == Model::kOrder && !ends) {
    // What has happened so far, and then the next event in part: its call has begun.
    if (std::string what = examine(at, promise); !what.empty()) return what;
    return all_images(at, history_.promise_within(at));
  }
  return combinations <= settings_.images_max ? all_images(at, promise)
                                              : some_images(at, promise, &random);
}

void Checker::choose(size_t piece, size_t content) {
  if (chosen_[piece] == content) return;
  chosen_[piece] = content;
  const Buffer& bytes = pieces_[piece].contents[content];
  std::memcpy(recovery_.memory() + pieces_[piece].offset, bytes.data(), bytes.size());
}

std::string Checker::all_images(size_t at, const Promise& promise) {
  while (true) {
    if (std::string what = examine(at, promise); !what.empty()) return what;
    size_t i = 0;  // counts up in a number whose digits are the choices
    for (; i < pieces_.size(); ++i) {
      const size_t next = (chosen_[i] + 1) % pieces_[i].contents.size();
      choose(i, next);
      if (next != 0) break;
    }
    if (i == pieces_.size()) return "";
  }
}

std::string Checker::some_images(size_t at, const Promise& promise, std::mt19937_64* random) {
  const size_t count = pieces_.size();
  for (uint64_t image = 0; image < settings_.images_max; ++image) {
    const uint64_t percent = (*random)() % 5 * 25;  // how much of it gets out, at a guess
    for (size_t i = 0; i < count; ++i) {
      if (image < 2) {
        choose(i, image);
      } else if (image < 2 + 2 * count) {
        choose(i, (i == (image - 2) / 2) == (image % 2 == 0) ? 1 : 0);
      } else {
        const bool whole = (*random)() % 2 == 0;  // else torn in some way
        const bool out = (*random)() % 100 < percent;
        choose(i, whole ? (out ? 1 : 0) : (*random)() % pieces_[i].contents.size());
      }
    }
    if (std::string what = examine(at, promise); !what.empty()) return what;
  }
  return "";
}

std::string Checker::examine(size_t at, const Promise& promise) {
  const uint64_t image = images_++;
  std::string what = recovery_.broken(promise);
  const bool goes_on = settings_.future_every > 0 && image % settings_.future_every == 0;
  if (what.empty() && goes_on) what = recovery_.broken_future();
  if (see_) see_(at, recovery_.memory(), hardware_.durable().size());
  if (what.empty()) return what;
  const bool ends = at == history_.events.size();
  std::string where = ends ? "the end" : "event " + std::to_string(at);
  if (!ends) where += " (" + history_.events[at].site + ")";
  return "crash at " + where + ", image " + std::to_string(image) + ": " + what;
}

}  // namespace lightckpt
