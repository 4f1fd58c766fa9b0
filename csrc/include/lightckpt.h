// The C ABI of lightckpt: everything that leaves the core, and all that Python sees.
//
// This file is read twice: by the compiler, and as it stands by cffi (bindings/build_ffi.py). So it
// holds declarations only, no #include and no macro but integer constants.
//
// Conventions, for every function here:
//   - Returns LCKPT_OK or a negative LCKPT_E code; lckpt_errmsg() then says what went wrong, for
//     the calling thread, until that thread's next call.
//   - A handle is opaque. The function that makes one stores it through its last argument; the
//     function that frees one takes its address and sets it to NULL, so a second free is harmless.
//   - Sizes and offsets are in bytes, times in nanoseconds of CLOCK_MONOTONIC unless said.
//   - A handle may be NULL, which is LCKPT_E_INVALID; pointers to results must be valid.
//   - Pointers are borrowed for the call, except a span's memory: that must stay valid and, for a
//     write, unchanged until its batch is done: when lckpt_wait says anything but LCKPT_E_TIMEOUT,
//     neither a worker nor a device has any of it under way. So it is of a dropped attempt's, too.
//   - Any thread may call; begin, commit, drop, pin, rebase and close are for one thread at a time.
//   - In a child made by fork every call fails with LCKPT_E_INVALID: the child is inert.

#define LCKPT_OK 0
#define LCKPT_E_INVALID -1   /* the caller broke a rule of this header */
#define LCKPT_E_IO -2        /* the media failed in this call; a later one may succeed */
#define LCKPT_E_NOT_FOUND -3 /* no such file, version or batch */
#define LCKPT_E_NO_SPACE -4  /* it does not fit; nothing was overwritten */
#define LCKPT_E_BUSY -5      /* another process or handle holds the store */
#define LCKPT_E_FORMAT -6    /* not a store, another format, truncated, or a checksum is wrong */
#define LCKPT_E_TIMEOUT -7   /* not done within the time given */
#define LCKPT_E_CHANGED -8   /* bytes differ from their checksums; the batch's report says where */
#define LCKPT_E_ACCESS -9    /* not permitted, or read-only */
#define LCKPT_E_LOST -10     /* the media is lost to this handle; it commits nothing more */

/* What has to happen before a store is durable: the media's granularity. */
#define LCKPT_BYTE 0       /* caches are in the persistence domain (eADR): a fence is enough */
#define LCKPT_CACHE_LINE 1 /* CLWB or non-temporal stores, then a fence (ADR) */
#define LCKPT_PAGE 2       /* msync */
#define LCKPT_VOLATILE 3   /* survives the process, not the machine */

/* Media to ask for; AUTO takes what the path is. */
#define LCKPT_MEDIA_AUTO 0
#define LCKPT_MEDIA_PMEM 1     /* a DAX mapping with MAP_SYNC, or device DAX; an error elsewhere */
#define LCKPT_MEDIA_FILE 2     /* a plain file with msync */
#define LCKPT_MEDIA_TMPFS 3    /* memory that survives the process */
#define LCKPT_MEDIA_HEAP 4     /* this process's memory: for measuring and tests */
#define LCKPT_MEDIA_EMULATED 5 /* the instructions of persistent memory on whatever the path is */

/* Where a store's slots and manifests are. AUTO: as the store has it, a new one in itself. */
#define LCKPT_CATALOG_AUTO 0
#define LCKPT_CATALOG_LINES 1   /* slots are lines of the media, manifests lie among the areas */
#define LCKPT_CATALOG_PMEMOBJ 2 /* both in a libpmemobj pool beside the store: PATH.catalog */

#define LCKPT_READ_ONLY 1 /* open: no writer's lock, no workers that write, never creates */
#define LCKPT_CREATE 2    /* open: make a new store where the path does not exist */

/* What a batch does with each span. */
#define LCKPT_WRITE 0  /* memory to media, filling the checksum table */
#define LCKPT_READ 1   /* media to memory, verified */
#define LCKPT_CHECK 2  /* memory against the checksum table, nothing is moved */
#define LCKPT_VERIFY 3 /* media against the checksum table; memory is not used */
#define LCKPT_COPY 4   /* media to memory, not verified */

/* Ways out of a GPU's memory, and in. */
#define LCKPT_HOST 0   /* through pinned staging, which workers empty, or fill */
#define LCKPT_DIRECT 1 /* copy engines reach the store's mapping, which is registered with CUDA */
#define LCKPT_DEVICE 2 /* copied aside on the GPU, and from there as direct or, if not, as host */
/* Registering and allocating take their time: what of the store is not registered yet goes as host,
   and a batch for which memory aside has not come yet goes from where it is. */

typedef struct lckpt_store lckpt_store;
typedef struct lckpt_lease lckpt_lease; /* on the memory of a store */

typedef struct {
  uint32_t flags;   /* LCKPT_READ_ONLY, LCKPT_CREATE */
  uint32_t media;   /* LCKPT_MEDIA_ */
  uint32_t workers; /* threads; 0 takes one per usable core, at most 8 */
  uint32_t slots;   /* versions a new store can name at once, 4 to 64; 0 takes 64 */
  uint32_t catalog; /* LCKPT_CATALOG_ */
  uint32_t reserved;
  uint64_t bytes; /* size of a new store; 0 starts small and grows */
} lckpt_options;

typedef struct {
  uint64_t store_id;
  uint64_t bytes;       /* of the media now */
  uint64_t free_bytes;  /* not reached from a valid slot */
  uint32_t media;       /* LCKPT_MEDIA_, as found */
  uint32_t granularity; /* LCKPT_BYTE to LCKPT_VOLATILE */
  uint32_t emulated;    /* granularity was forced */
  uint32_t slots;
  uint32_t workers;
  uint32_t flush_method; /* 0 none, 1 clflush, 2 clflushopt, 3 clwb, 4 msync */
  uint32_t catalog;      /* LCKPT_CATALOG_LINES or _PMEMOBJ */
  uint32_t reserved;
  uint64_t commits; /* by this handle */
  uint64_t drops;
  uint64_t bytes_persisted;
  uint64_t commit_ns; /* the last commit: from the record's first byte to the drained slot */
} lckpt_info;

typedef struct {
  uint64_t version;
  uint64_t step;
  uint32_t generation;
  uint32_t slot;
  uint32_t pinned;  /* 1: by this handle; 2: held by a reader */
  uint32_t damaged; /* 1: its manifest is damaged; it cannot be loaded, and is not kept */
  uint32_t record_bytes;
  uint32_t manifest_bytes;
  uint32_t extent_count;
  uint64_t area_bytes;
} lckpt_version;

typedef struct {
  void* memory;
  uint32_t extent; /* index in the manifest */
  uint32_t reserved;
} lckpt_span;

typedef struct {
  uint64_t bytes; /* moved or looked at so far */
  uint64_t submit_ns;
  uint64_t start_ns;  /* 0: not started */
  uint64_t end_ns;    /* 0: not done */
  uint32_t bad_count; /* chunks that did not match */
  uint32_t bad[15];   /* extents of the first of them */
  uint32_t in_place;  /* 1: copy engines reached the store; 0: staging, or no device's memory */
  uint32_t reserved;
} lckpt_report;

typedef struct {
  uint32_t ordinal; /* of the device, as CUDA counts: memory and stream are of it */
  uint32_t how;     /* LCKPT_HOST to LCKPT_DEVICE */
  uint64_t stream;  /* a CUstream, or 0 and 1 for the legacy one, 2 for the thread's */
} lckpt_on_device;

typedef struct {
  char name[128];
  uint32_t driver; /* the driver's version: 12040 is CUDA 12.4 */
  uint32_t direct; /* 1: copy engines reach the store */
  uint64_t staging_bytes;
  char why_not[256]; /* if direct is 0 */
} lckpt_device;

const char* lckpt_errmsg(void);

/* Opening never formats: with LCKPT_CREATE a missing path becomes a new store, nothing else does.
 */
int lckpt_open(const char* path, const lckpt_options* options, lckpt_store** store);
/* Waits for calls that other threads are in, then stops the workers; an attempt that was not
   committed is dropped. Calls that come later find the store closed: what is left of a handle is
   some hundred bytes, kept for them until the process ends. */
int lckpt_close(lckpt_store** store);
int lckpt_stat(lckpt_store* store, lckpt_info* info);

/* The versions that can be loaded now, newest first; at most capacity of them. */
int lckpt_versions(lckpt_store* store, lckpt_version* versions, uint32_t capacity, uint32_t* count);
/* The bytes of a version's manifest (the opaque part) and host state, where they lie on the media:
   valid until the version is retired (pin it). Both were checked against their checksums. Not to be
   written to. */
int lckpt_view(lckpt_store* store, uint64_t version, const void** manifest,
               uint64_t* manifest_bytes, const void** host, uint64_t* host_bytes);
/* Where an extent of a version lies in this process's memory, and its size. On a store opened with
   LCKPT_READ_ONLY, of a file, that is a private mapping of its own: what is written there is seen
   there only, and not by batches, until the version is retired or pinned for the first time again.
   Pin it first. */
int lckpt_locate(lckpt_store* store, uint64_t version, uint32_t extent, void** memory,
                 uint64_t* bytes);
/* Keeps the store's memory mapped, after lckpt_close too, until the lease is let go. Neither the
   store stays open for it, nor a version. In a forked child letting go does nothing. */
int lckpt_hold(lckpt_store* store, lckpt_lease** lease);
int lckpt_let_go(lckpt_lease** lease);
/* Keeps a version from being retired, across processes for as long as this process lives. */
int lckpt_pin(lckpt_store* store, uint64_t version, int pinned);
/* Makes an older version the latest, in a new generation; the newer ones are retired. Not while an
   attempt is in flight. */
int lckpt_rebase(lckpt_store* store, uint64_t version);

/* Starts an attempt at a version: `extents` gives each extent's bytes, in layout order; `blob` is
   the opaque part of the manifest; `keep` versions stay restorable. Grows the store as needed; on
   LCKPT_E_NO_SPACE nothing was changed. One attempt at a time. */
int lckpt_begin(lckpt_store* store, uint64_t step, uint32_t keep, const uint64_t* extents,
                uint32_t extent_count, const void* blob, uint64_t blob_bytes, uint64_t host_bytes);
/* Queues a batch. `version` names what to read; 0 is the attempt in flight. */
int lckpt_submit(lckpt_store* store, uint32_t op, uint64_t version, const lckpt_span* spans,
                 uint32_t count, uint64_t* batch);
/* Makes a GPU ready for spans of its memory, and tries whether its copy engines reach the store;
   later calls say so again. `staging_bytes` of pinned memory; 0 takes 128 MiB. LCKPT_E_NOT_FOUND:
   there is no driver, or no such device. LCKPT_E_INVALID: the environment's LIGHTCKPT_CUDA_BATCH is
   neither 1, where the driver may be given copies in batches, nor 0. */
int lckpt_open_device(lckpt_store* store, uint32_t ordinal, uint64_t staging_bytes,
                      lckpt_device* device);
/* The same as submit for memory on a device; not LCKPT_VERIFY. What the stream has been given comes
   before; nothing waits for it on the host. Such batches need not be waited for ahead of a commit:
   it waits for them, and fails with LCKPT_E_CHANGED where a check among them found other bytes.
   LCKPT_E_BUSY: the stream captures a CUDA graph. */
int lckpt_submit_on(lckpt_store* store, const lckpt_on_device* on, uint32_t op, uint64_t version,
                    const lckpt_span* spans, uint32_t count, uint64_t* batch);
/* What the stream is given from now on comes after the batch's copies. Waits on the host only where
   a batch is larger than the staging that it goes through, and then until the last piece is on its
   way. */
int lckpt_stream_wait(lckpt_store* store, uint64_t batch, uint64_t stream, int64_t timeout_ns);
/* Waits until a batch is done (copied, not yet durable); timeout_ns < 0 waits for ever, 0 polls. */
int lckpt_wait(lckpt_store* store, uint64_t batch, int64_t timeout_ns, lckpt_report* report);
/* Queues the commit of the attempt; its batch is done when the version is durable. Every span of
   the manifest must have been written and waited for, or be on its way from a device. */
int lckpt_commit(lckpt_store* store, const void* host, uint64_t host_bytes, uint64_t* batch);
/* Gives the attempt up; what no worker has begun to copy is left out. LCKPT_E_TIMEOUT: a worker has
   not left it yet; it is given up all the same, and the next begin looks again. A commit that is
   queued is not taken back: then this waits until it is done. The version stands, unless writes of
   it were unfinished: these are left out, and the commit says so. */
int lckpt_drop(lckpt_store* store, int64_t timeout_ns);

/* Time of one plain copy of `bytes` into a warm part of the store, by `workers` threads (the median
   of three): what a checkpoint costs at least. */
int lckpt_calibrate(uint64_t bytes, uint32_t workers, uint64_t* copy_ns);
