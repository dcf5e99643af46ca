// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Registrations of private memory (private.h): the shadows, and the table of regions.
 *
 * Shadows lie in grounds, files that the device maps. They are sparse: of a ground only those pages
 * cost memory that something was copied to. A session can share few pieces of memory, so each
 * ground is as large as all before it.
 */
#define VRDMA_KERNEL_ITSELF
#include "kernel.h"

#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "loan.h"
#include "maps.h"
#include "private.h"
#include "virtio_rdma.h"

#define PAGE ((size_t)4096)
#define GROUND ((size_t)64 << 20)
#define FIRST_BUCKETS 64u
#define WRITES (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |   \
		IBV_ACCESS_MW_BIND)

/* A piece of shared memory, and what lies in it. */
struct vrdma_ground {
	struct vrdma_ground *next;
	uint8_t *base;
	size_t len;
	struct vrdma_shadow *shadows;
};

/* ---- Grounds and shadows, under the session's `tables` --------------------------------------- */

static int new_ground(struct vrdma_session *session, struct vrdma_mirror *mirror, size_t len)
{
	struct vrdma_ground *ground = calloc(1, sizeof(*ground));
	int fd, ret;

	if (!ground)
		return ENOMEM;
	fd = vrdma_sealed_file(len);
	if (fd < 0) {
		ret = vrdma_no_file();
		free(ground);
		return ret;
	}
	ground->len = len;
	ground->base = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	ret = ground->base == MAP_FAILED ? ENOMEM : 0;
	if (!ret) {
		madvise(ground->base, len, MADV_DONTFORK);
		ret = vrdma_memory_add(session, ground->base, len, fd, 0);
		if (ret)
			munmap(ground->base, len);
	}
	/* The mapping has the file for as long as it is there. */
	close(fd);
	if (ret) {
		free(ground);
		return ret;
	}
	ground->next = mirror->grounds;
	mirror->grounds = ground;
	return 0;
}

/* The first gap that is large enough. */
static int place(struct vrdma_ground *ground, struct vrdma_shadow *shadow)
{
	struct vrdma_shadow **at = &ground->shadows;
	uint8_t *from = ground->base, *to;

	for (;;) {
		to = *at ? (*at)->base : ground->base + ground->len;
		if ((size_t)(to - from) >= shadow->len)
			break;
		if (!*at)
			return 0;
		from = (*at)->base + (*at)->len;
		at = &(*at)->next;
	}
	shadow->base = from;
	shadow->ground = ground;
	shadow->next = *at;
	*at = shadow;
	return 1;
}

static int find_place(struct vrdma_mirror *mirror, struct vrdma_shadow *shadow)
{
	struct vrdma_ground *ground;

	for (ground = mirror->grounds; ground && !place(ground, shadow); ground = ground->next)
		;
	return !!ground;
}

static int shadow_make(struct vrdma_session *session, struct vrdma_mirror *mirror,
		       struct vrdma_shadow *shadow)
{
	const struct vrdma_ground *ground;
	size_t all = GROUND;
	int ret;

	if (find_place(mirror, shadow))
		return 0;
	for (ground = mirror->grounds; ground; ground = ground->next)
		all += ground->len;
	ret = ENOMEM;
	if (shadow->len < all)
		ret = new_ground(session, mirror, all);
	/* A NIC may have a limit that only what is needed is within. */
	if (ret == ENOMEM)
		ret = new_ground(session, mirror, shadow->len);
	if (ret)
		return ret;
	return find_place(mirror, shadow) ? 0 : ENOMEM;
}

static void drop_ground(struct vrdma_session *session, struct vrdma_ground **at)
{
	struct vrdma_ground *ground = *at;

	*at = ground->next;
	vrdma_memory_remove(session, ground->base, ground->len);
	munmap(ground->base, ground->len);
	free(ground);
}

/* The host has the pages back. The first ground stays: the next registration may want it. */
static void shadow_drop(struct vrdma_session *session, struct vrdma_mirror *mirror,
			struct vrdma_shadow *shadow)
{
	struct vrdma_shadow **at = &shadow->ground->shadows;
	struct vrdma_ground **ground;

	while (*at != shadow)
		at = &(*at)->next;
	*at = shadow->next;
	madvise(shadow->base, shadow->len, MADV_REMOVE);
	if (shadow->ground->shadows)
		return;
	for (ground = &mirror->grounds; *ground != shadow->ground; ground = &(*ground)->next)
		;
	if ((*ground)->next)
		drop_ground(session, ground);
}

/* ---- The table of regions -------------------------------------------------------------------- */

static struct vrdma_region **bucket(struct vrdma_mirror *mirror, uint32_t key)
{
	/* The upper bits are random (the specification, 6.2). */
	return &mirror->buckets[(key >> 8) & mirror->mask];
}

struct vrdma_region *vrdma_region_get(struct vrdma_mirror *mirror, uint32_t key)
{
	struct vrdma_region *region;

	pthread_spin_lock(&mirror->lock);
	for (region = *bucket(mirror, key); region && region->key != key; region = region->next)
		;
	if (region)
		__atomic_fetch_add(&region->users, 1, __ATOMIC_RELAXED);
	pthread_spin_unlock(&mirror->lock);
	return region;
}

/*
 * A table that cannot grow only gets slower. Under the session's `tables`: two that saw it full at
 * once would both move what is in the old one.
 */
static void grow(struct vrdma_mirror *mirror)
{
	uint32_t old_buckets = mirror->mask + 1, i;
	struct vrdma_region **table, **old = mirror->buckets, *region;

	if (mirror->count < old_buckets)
		return;
	table = calloc((size_t)old_buckets * 2, sizeof(*table));
	if (!table)
		return;
	pthread_spin_lock(&mirror->lock);
	mirror->buckets = table;
	mirror->mask = old_buckets * 2 - 1;
	for (i = 0; i < old_buckets; i++) {
		while ((region = old[i])) {
			old[i] = region->next;
			region->next = *bucket(mirror, region->key);
			*bucket(mirror, region->key) = region;
		}
	}
	pthread_spin_unlock(&mirror->lock);
	free(old);
}

static void insert(struct vrdma_mirror *mirror, struct vrdma_region *region)
{
	grow(mirror);
	pthread_spin_lock(&mirror->lock);
	region->next = *bucket(mirror, region->key);
	*bucket(mirror, region->key) = region;
	mirror->count++;
	pthread_spin_unlock(&mirror->lock);
}

static struct vrdma_region *take_out(struct vrdma_mirror *mirror, uint32_t key)
{
	struct vrdma_region **at, *region;

	pthread_spin_lock(&mirror->lock);
	for (at = bucket(mirror, key); *at && (*at)->key != key; at = &(*at)->next)
		;
	region = *at;
	if (region) {
		*at = region->next;
		mirror->count--;
	}
	pthread_spin_unlock(&mirror->lock);
	return region;
}

/* Nobody finds it any more. A copy may take as long as the program's memory lets it. */
static void wait_for_users(const struct vrdma_region *region)
{
	const struct timespec moment = { .tv_nsec = 50000 };
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	while (__atomic_load_n(&region->users, __ATOMIC_ACQUIRE))
		nanosleep(&moment, NULL);
	pthread_setcancelstate(cancel, NULL);
}

/* ---- Mirrors, under the session's `tables` --------------------------------------------------- */

static void mirror_free(struct vrdma_mirror *mirror)
{
	vrdma_kept_forget(mirror, NULL);
	free(mirror->kept);
	free(mirror->buckets);
	pthread_mutex_destroy(&mirror->kept_lock);
	pthread_spin_destroy(&mirror->lock);
	free(mirror);
}

static int mirror_make(struct vrdma_session *session)
{
	struct vrdma_context *ctx = to_vctx(session->context);
	struct vrdma_mirror *mirror;
	int ret;

	if (ctx->mirror)
		return 0;
	mirror = calloc(1, sizeof(*mirror));
	if (!mirror)
		return ENOMEM;
	pthread_spin_init(&mirror->lock, PTHREAD_PROCESS_PRIVATE);
	pthread_mutex_init(&mirror->kept_lock, NULL);
	mirror->buckets = calloc(FIRST_BUCKETS, sizeof(*mirror->buckets));
	mirror->mask = FIRST_BUCKETS - 1;
	ret = mirror->buckets ? vrdma_jobs_begin(session, mirror) : ENOMEM;
	if (ret) {
		mirror_free(mirror);
		/* A device that has no mirrored regions reaches shared memory alone. */
		return ret == EOPNOTSUPP ? EFAULT : ret;
	}
	__atomic_store_n(&ctx->mirror, mirror, __ATOMIC_RELEASE);
	return 0;
}

static void region_drop(struct vrdma_session *session, struct vrdma_region *region)
{
	vrdma_tables_lock(session);
	shadow_drop(session, to_vctx(session->context)->mirror, &region->shadow);
	vrdma_tables_unlock(session);
	free(region);
}

static struct vrdma_region *region_make(struct vrdma_session *session, uint8_t *memory, size_t len,
					int *ret)
{
	size_t offset = (uintptr_t)memory & (PAGE - 1);
	struct vrdma_region *region = calloc(1, sizeof(*region));

	if (!region) {
		*ret = ENOMEM;
		return NULL;
	}
	region->memory = memory;
	region->len = len;
	region->half = align(offset + len, PAGE);
	region->shadow.len = 2 * region->half + (offset ? PAGE : 0);
	vrdma_tables_lock(session);
	*ret = mirror_make(session);
	if (!*ret)
		*ret = shadow_make(session, to_vctx(session->context)->mirror, &region->shadow);
	vrdma_tables_unlock(session);
	if (*ret) {
		free(region);
		return NULL;
	}
	region->in = region->shadow.base + offset;
	return region;
}

/* ---- Registrations --------------------------------------------------------------------------- */

static int goes_on(const struct vrdma_map *last, const struct vrdma_map *map)
{
	return last->to == map->from && last->dev == map->dev && last->ino == map->ino &&
	       last->offset + (last->to - last->from) == map->offset;
}

/* Notes one mapping more of a range, or that not all of it is of shared files. */
static void note(struct vrdma_filed *filed, const struct vrdma_map *map, int is_first)
{
	struct vrdma_map *last = filed->num ? &filed->maps[filed->num - 1] : NULL;

	if (!is_first && !last)
		return;
	/* Files of memory are on devices that are none. */
	if (!map->shared || !map->ino || major(map->dev)) {
		filed->num = 0;
	} else if (last && goes_on(last, map)) {
		last->to = map->to;
	} else if (filed->num < VRDMA_LOAN_PARTS) {
		filed->maps[filed->num++] = *map;
	} else {
		filed->num = 0;
	}
}

/*
 * Whether all of a range is there and may be used so: what a kernel finds out as it pins pages. And
 * of which files it is.
 */
static int look(uintptr_t at, size_t len, int access, struct vrdma_filed *filed)
{
	uintptr_t begin = at, end = at + len;
	struct vrdma_maps maps;
	struct vrdma_map map;

	filed->num = 0;
	/* Without it accesses fail that touch what is not there, and the registration does not. */
	if (!vrdma_maps_open(&maps))
		return 1;
	while (at < end && vrdma_maps_at(&maps, at, &map)) {
		if (!map.readable || (access & WRITES && !map.writable))
			break;
		note(filed, &map, at == begin);
		at = map.to;
	}
	vrdma_maps_close(&maps);
	return at >= end;
}

/* VHOST_RDMA_PRIVATE=1: a program's memory is private wherever it lies, to look for faults. */
static int all_is_private(void)
{
	static int known = -1;
	const char *value;

	if (known < 0) {
		value = getenv("VHOST_RDMA_PRIVATE");
		known = value && !strcmp(value, "1");
	}
	return known;
}

static int cover_it(struct vrdma_session *session, const void *addr, size_t len, int access,
		    struct vrdma_cover *cover)
{
	struct vrdma_filed filed;
	const void *there;
	int ret;

	memset(cover, 0, sizeof(*cover));
	if (!session)
		return EIO;
	if ((uint32_t)access & VIRTIO_RDMA_ACCESS_MIRRORED)
		return EINVAL;
	cover->access = (uint32_t)access;
	cover->length = len;
	cover->pages = vrdma_list(addr, len);
	ret = len && all_is_private() && !vrdma_is_own(addr) ? EFAULT :
		vrdma_share(session, addr, len);
	if (ret != EFAULT || !look((uintptr_t)addr, len, access, &filed))
		return ret;
	if (filed.num && !all_is_private() &&
	    !vrdma_lend(session, &filed, (uintptr_t)addr, len, &cover->loan, &there)) {
		cover->pages = vrdma_list(there, len);
		return 0;
	}
	cover->region = region_make(session, (uint8_t *)addr, len, &ret);
	if (!cover->region)
		return ret;
	cover->access |= VIRTIO_RDMA_ACCESS_MIRRORED;
	cover->length = 2 * cover->region->half;
	cover->pages = vrdma_list(cover->region->in, cover->length);
	return 0;
}

int vrdma_cover(struct vrdma_session *session, const void *addr, size_t len, int access,
		struct vrdma_cover *cover)
{
	int ret, cancel;

	/* Who were cancelled while he looks would leave what he looks with. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	ret = cover_it(session, addr, len, access, cover);
	pthread_setcancelstate(cancel, NULL);
	return ret;
}

int vrdma_cover_keep(struct vrdma_session *session, const struct vrdma_cover *cover, uint32_t key,
		     uint64_t iova)
{
	if (cover->loan)
		return vrdma_loan_keep(session, cover->loan, key);
	if (!cover->region)
		return 0;
	cover->region->key = key;
	cover->region->iova = iova;
	vrdma_tables_lock(session);
	insert(to_vctx(session->context)->mirror, cover->region);
	vrdma_tables_unlock(session);
	return 0;
}

void vrdma_cover_drop(struct vrdma_session *session, const struct vrdma_cover *cover)
{
	if (cover->loan)
		vrdma_loan_drop(session, cover->loan);
	if (cover->region)
		region_drop(session, cover->region);
}

int vrdma_is_private(struct vrdma_session *session, uint32_t key)
{
	struct vrdma_mirror *mirror = session ? to_vctx(session->context)->mirror : NULL;
	struct vrdma_region *region = mirror ? vrdma_region_get(mirror, key) : NULL;

	if (region)
		vrdma_region_put(region);
	return !!region;
}

void vrdma_private_forget(struct vrdma_session *session, uint32_t key)
{
	struct vrdma_mirror *mirror = session ? to_vctx(session->context)->mirror : NULL;
	struct vrdma_region *region = mirror ? take_out(mirror, key) : NULL;

	if (!region)
		return;
	wait_for_users(region);
	region_drop(session, region);
}

void vrdma_private_end(struct vrdma_session *session)
{
	struct vrdma_context *ctx = session->context ? to_vctx(session->context) : NULL;
	struct vrdma_mirror *mirror = ctx ? ctx->mirror : NULL;
	struct vrdma_ground *ground;
	struct vrdma_region *region;
	uint32_t i;

	if (!mirror)
		return;
	ctx->mirror = NULL;
	vrdma_jobs_end(mirror);
	for (i = 0; i <= mirror->mask; i++) {
		while ((region = mirror->buckets[i])) {
			mirror->buckets[i] = region->next;
			free(region);
		}
	}
	while ((ground = mirror->grounds)) {
		mirror->grounds = ground->next;
		munmap(ground->base, ground->len);
		free(ground);
	}
	mirror_free(mirror);
}

/* The shadows are its parent's, and so is the thread. Nothing is freed (memory.c says why). */
void vrdma_private_in_child(struct vrdma_session *session)
{
	struct vrdma_context *ctx = session->context ? to_vctx(session->context) : NULL;

	if (!ctx || !ctx->mirror)
		return;
	vrdma_file_close(&ctx->mirror->jobs);
	ctx->mirror = NULL;
}
