// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Loans (loan.h).
 *
 * The device knows a loan by addresses that nothing else of this process has: a range that is
 * reserved for it and never touched. So a mapping that comes in the place of another one is another
 * loan, and two mappings of one file are one.
 *
 * A loan is of a whole mapping, if the NIC's limits allow, and serves all regions in it: a session
 * may share few pieces of memory. With the last region it ends, and the file is the program's alone
 * again. What the device refuses is private memory (private.h), as what is no file's is.
 */
#define VRDMA_KERNEL_ITSELF
#define _GNU_SOURCE
#include "kernel.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "loan.h"
#include "private.h"
#include "virtio_rdma.h"

#define PAGE ((size_t)4096)
#define HUGETLBFS 0x958458f6
/* Seals that keep the device from writing; F_SEAL_FUTURE_WRITE is newer than some headers. */
#define NO_WRITES (F_SEAL_WRITE | 0x10)
#define SHM "/dev/shm/"
/* Of the pieces that a session may have: the others are for rings, the heap and shadows. */
#define MOST_PIECES 32

struct part {
	uint64_t dev;
	uint64_t ino;
	uint64_t offset;
	size_t len;
};

struct vrdma_loan {
	struct vrdma_loan *next;
	uint8_t *base;
	size_t len;
	uint32_t users;
	int gone;		/* the device has it no more */
	size_t num;
	struct part parts[VRDMA_LOAN_PARTS];
};

/* A region's. */
struct vrdma_lent {
	struct vrdma_lent *next;
	uint32_t key;
	struct vrdma_loan *loan;
};

/* ---- Files ----------------------------------------------------------------------------------- */

/* A file of the program's, and whether the descriptor is ours. */
struct file {
	int fd;
	int ours;
	size_t page;
	uint64_t size;
};

static int is_it(const struct stat *stat, const struct vrdma_map *map)
{
	return stat->st_dev == map->dev && stat->st_ino == map->ino && S_ISREG(stat->st_mode);
}

/* Shared memory or huge pages (no other file has seals), for reading and writing. */
static int is_fit(int fd)
{
	int flags = fcntl(fd, F_GETFL), seals = fcntl(fd, F_GET_SEALS);

	return flags >= 0 && (flags & O_ACCMODE) == O_RDWR && seals >= 0 && !(seals & NO_WRITES);
}

static int names(int fd, const struct vrdma_map *map)
{
	struct stat stat;

	return fd >= 0 && !fstat(fd, &stat) && is_it(&stat, map);
}

/*
 * A descriptor of the file that the program has open: it, -1 if there is none, -2 if there is none
 * that is fit. The one that was found last is looked at first, since a program may have thousands.
 * It is not duplicated: to close a duplicate would take from the program the locks that it has on
 * the file (fcntl(2), record locks).
 */
static int find_open(const struct vrdma_map *map)
{
	static int last = -1;
	int fd = __atomic_load_n(&last, __ATOMIC_RELAXED), found = -1;
	const struct dirent *entry;
	DIR *dir;

	if (names(fd, map) && is_fit(fd))
		return fd;
	dir = opendir("/proc/self/fd");
	while (dir && found < 0 && (entry = readdir(dir))) {
		fd = entry->d_name[0] == '.' ? -1 : atoi(entry->d_name);
		if (fd != dirfd(dir) && names(fd, map))
			found = is_fit(fd) ? fd : -2;
	}
	if (dir)
		closedir(dir);
	if (found >= 0)
		__atomic_store_n(&last, found, __ATOMIC_RELAXED);
	return found;
}

/* Opens a name if it is the file's. One that is not fit is of no use, and may wait when opened. */
static int open_name(const char *name, const struct vrdma_map *map)
{
	struct stat stat;
	int fd;

	if (lstat(name, &stat) || !is_it(&stat, map))
		return -1;
	fd = open(name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	if (fd >= 0 && (fstat(fd, &stat) || !is_it(&stat, map) || !is_fit(fd))) {
		close(fd);
		return -1;
	}
	return fd;
}

/*
 * A file that the program has closed behind its mapping, as it may with shm_open(3): by its name
 * where it still has one, or through the mapping, which takes privileges (proc(5), map_files). The
 * program has no locks on a file of which it has no descriptor.
 */
static int open_again(const struct vrdma_map *map)
{
	char link[64], name[sizeof(SHM) + 256];
	struct stat found;
	ssize_t len;
	int fd = -1;

	snprintf(link, sizeof(link), "/proc/self/map_files/%lx-%lx", (unsigned long)map->from,
		 (unsigned long)map->to);
	len = readlink(link, name, sizeof(name) - 1);
	if (len > 0) {
		name[len] = 0;
		if (!strncmp(name, SHM, strlen(SHM)))
			fd = open_name(name, map);
	}
	if (fd < 0 && !stat(link, &found) && is_it(&found, map)) {
		fd = open(link, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
		if (fd >= 0 && (fstat(fd, &found) || !is_it(&found, map) || !is_fit(fd))) {
			close(fd);
			fd = -1;
		}
	}
	return fd;
}

static int find_file(const struct vrdma_map *map, struct file *file)
{
	struct statfs system;
	struct stat stat;

	file->fd = find_open(map);
	file->ours = file->fd == -1;
	if (file->ours)
		file->fd = open_again(map);
	if (file->fd < 0)
		return EFAULT;
	if (fstat(file->fd, &stat) || fstatfs(file->fd, &system)) {
		if (file->ours)
			close(file->fd);
		return EFAULT;
	}
	file->page = (uint32_t)system.f_type == HUGETLBFS ? (size_t)system.f_bsize : PAGE;
	file->size = (uint64_t)stat.st_size;
	return 0;
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

static uint64_t down(uint64_t value, uint64_t page)
{
	return value / page * page;
}

/*
 * What of a mapping is lent: from `first` to `end` in its file, or all of it; in pages of the file,
 * and no further than that reaches.
 */
static int choose(const struct vrdma_map *map, const struct file *file, uint64_t first,
		  uint64_t end, int whole, struct part *part)
{
	uint64_t most = down(file->size + file->page - 1, file->page);

	first = down(first, file->page);
	end = down(end + file->page - 1, file->page);
	if (end > most)
		return EFAULT;
	if (whole) {
		first = map->offset;
		end = map->offset + (map->to - map->from);
		if (end > most)
			end = most;
	}
	*part = (struct part){ map->dev, map->ino, first, end - first };
	return 0;
}

static int give(struct vrdma_session *session, const struct vrdma_map *map,
		const struct file *file, const struct part *part, void *base)
{
	struct stat stat;
	int ret = vrdma_memory_add(session, base, part->len, file->fd, part->offset);

	if (ret)
		return ret;
	/* Another thread may have closed the descriptor, and another file may have its number. */
	if (!fstat(file->fd, &stat) && is_it(&stat, map))
		return 0;
	vrdma_memory_remove(session, base, part->len);
	return EFAULT;
}

static void take_back(struct vrdma_session *session, const struct vrdma_loan *loan, size_t num)
{
	uint8_t *base = loan->base;
	size_t i;

	/* What the program has cut off meanwhile is gone there already. */
	for (i = 0; i < num; i++) {
		vrdma_memory_remove(session, base, loan->parts[i].len);
		base += loan->parts[i].len;
	}
	munmap(loan->base, loan->len);
}

static int give_all(struct vrdma_session *session, const struct vrdma_filed *filed,
		    const struct file *files, struct vrdma_loan *loan)
{
	uint8_t *at;
	size_t i;
	int ret;

	loan->len = 0;
	for (i = 0; i < filed->num; i++)
		loan->len += loan->parts[i].len;
	loan->base = mmap(NULL, loan->len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			  -1, 0);
	if (loan->base == MAP_FAILED)
		return ENOMEM;
	madvise(loan->base, loan->len, MADV_DONTFORK);
	for (i = 0, at = loan->base; i < filed->num; at += loan->parts[i++].len) {
		ret = give(session, &filed->maps[i], &files[i], &loan->parts[i], at);
		if (ret) {
			take_back(session, loan, i);
			return ret;
		}
	}
	loan->num = filed->num;
	return 0;
}

/* Where a range begins in the file of its first mapping. */
static uint64_t in_file(const struct vrdma_map *map, uintptr_t at)
{
	return map->offset + (at - map->from);
}

static int choose_all(const struct vrdma_filed *filed, const struct file *files, uintptr_t at,
		      size_t len, int whole, struct vrdma_loan *loan)
{
	uintptr_t end = at + len;
	size_t i;
	int ret = 0;

	for (i = 0; i < filed->num && !ret; i++) {
		const struct vrdma_map *map = &filed->maps[i];
		uintptr_t from = i ? map->from : at, to = map->to < end ? map->to : end;

		ret = choose(map, &files[i], in_file(map, from), in_file(map, to), whole,
			     &loan->parts[i]);
	}
	return ret;
}

/* ---- Loans, under the session's `tables` ----------------------------------------------------- */

static int covers(const struct vrdma_loan *loan, const struct vrdma_map *map, uint64_t first,
		  size_t len)
{
	const struct part *part = &loan->parts[0];

	return loan->num == 1 && !loan->gone && part->dev == map->dev && part->ino == map->ino &&
	       first >= part->offset && first - part->offset <= part->len &&
	       len <= part->len - (first - part->offset);
}

static struct vrdma_loan *find_loan(const struct vrdma_session *session,
				    const struct vrdma_filed *filed, uintptr_t at, size_t len)
{
	struct vrdma_loan *loan = NULL;

	if (filed->num == 1) {
		for (loan = session->loans; loan; loan = loan->next) {
			if (covers(loan, &filed->maps[0], in_file(&filed->maps[0], at), len))
				break;
		}
	}
	return loan;
}

static size_t pieces(const struct vrdma_session *session)
{
	const struct vrdma_loan *loan;
	size_t all = 0;

	for (loan = session->loans; loan; loan = loan->next)
		all += loan->num;
	return all;
}

static int new_loan(struct vrdma_session *session, const struct vrdma_filed *filed, uintptr_t at,
		    size_t len, struct vrdma_loan **made)
{
	struct file files[VRDMA_LOAN_PARTS];
	struct vrdma_loan *loan;
	size_t found = 0;
	int ret = 0;

	if (pieces(session) + filed->num > MOST_PIECES)
		return ENOMEM;
	loan = calloc(1, sizeof(*loan));
	if (!loan)
		return ENOMEM;
	while (!ret && found < filed->num) {
		ret = find_file(&filed->maps[found], &files[found]);
		found += !ret;
	}
	/* Mappings side by side are given as far as they are named: they are so there, too. */
	if (!ret)
		ret = choose_all(filed, files, at, len, filed->num == 1, loan);
	if (!ret)
		ret = give_all(session, filed, files, loan);
	/* A NIC may have a limit that only what is needed is within. */
	if (ret == ENOMEM && filed->num == 1) {
		ret = choose_all(filed, files, at, len, 0, loan);
		if (!ret)
			ret = give_all(session, filed, files, loan);
	}
	while (found--) {
		if (files[found].ours)
			close(files[found].fd);
	}
	if (ret) {
		free(loan);
		return ret;
	}
	loan->next = session->loans;
	session->loans = loan;
	*made = loan;
	return 0;
}

static void put_loan(struct vrdma_session *session, struct vrdma_loan *loan)
{
	struct vrdma_loan **at;

	if (--loan->users)
		return;
	for (at = &session->loans; *at != loan; at = &(*at)->next)
		;
	*at = loan->next;
	take_back(session, loan, loan->num);
	free(loan);
}

static struct vrdma_lent **lent_at(struct vrdma_session *session, uint32_t key)
{
	/* The upper bits are random (the specification, 6.2). */
	struct vrdma_lent **at = &session->lent[(key >> 8) % VRDMA_LENT_BUCKETS];

	while (*at && (*at)->key != key)
		at = &(*at)->next;
	return at;
}

/* ---- What private.c asks for ----------------------------------------------------------------- */

int vrdma_lend(struct vrdma_session *session, const struct vrdma_filed *filed, uintptr_t at,
	       size_t len, struct vrdma_loan **loan, const void **there)
{
	int ret = 0;

	vrdma_tables_lock(session);
	*loan = find_loan(session, filed, at, len);
	if (!*loan)
		ret = new_loan(session, filed, at, len, loan);
	if (!ret) {
		(*loan)->users++;
		*there = (*loan)->base + (in_file(&filed->maps[0], at) - (*loan)->parts[0].offset);
	}
	vrdma_tables_unlock(session);
	return ret;
}

int vrdma_loan_keep(struct vrdma_session *session, struct vrdma_loan *loan, uint32_t key)
{
	struct vrdma_lent *lent = malloc(sizeof(*lent)), **at;

	if (!lent)
		return ENOMEM;
	vrdma_tables_lock(session);
	at = &session->lent[(key >> 8) % VRDMA_LENT_BUCKETS];
	*lent = (struct vrdma_lent){ *at, key, loan };
	*at = lent;
	vrdma_tables_unlock(session);
	return 0;
}

void vrdma_loan_drop(struct vrdma_session *session, struct vrdma_loan *loan)
{
	vrdma_tables_lock(session);
	put_loan(session, loan);
	vrdma_tables_unlock(session);
}

void vrdma_loan_gone(struct vrdma_session *session, struct vrdma_loan *loan)
{
	vrdma_tables_lock(session);
	loan->gone = 1;
	vrdma_tables_unlock(session);
}

int vrdma_is_lent(struct vrdma_session *session, uint32_t key)
{
	int found;

	if (!session)
		return 0;
	vrdma_tables_lock(session);
	found = !!*lent_at(session, key);
	vrdma_tables_unlock(session);
	return found;
}

void vrdma_lent_forget(struct vrdma_session *session, uint32_t key)
{
	struct vrdma_lent **at, *lent;

	if (!session)
		return;
	vrdma_tables_lock(session);
	at = lent_at(session, key);
	lent = *at;
	if (lent) {
		*at = lent->next;
		put_loan(session, lent->loan);
	}
	vrdma_tables_unlock(session);
	free(lent);
}

/* The device has let go of everything. */
void vrdma_loans_end(struct vrdma_session *session)
{
	struct vrdma_loan *loan;
	struct vrdma_lent *lent;
	size_t i;

	for (i = 0; i < VRDMA_LENT_BUCKETS; i++) {
		while ((lent = session->lent[i])) {
			session->lent[i] = lent->next;
			free(lent);
		}
	}
	while ((loan = session->loans)) {
		session->loans = loan->next;
		munmap(loan->base, loan->len);
		free(loan);
	}
}
