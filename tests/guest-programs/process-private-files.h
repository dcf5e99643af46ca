/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * process-private: memory that is a file's. Of shared memory the device has the file itself, and
 * such memory is copied once; all else takes every operation as other private memory does.
 *
 * Which way memory goes shows by a receive: the device puts it into shared memory, and the library
 * into private memory when the completion is polled (vhost-rdma/process/README.md, Memory).
 */
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/statfs.h>

/* What makes two pieces of ROOM bytes. */
struct mapping {
	const char *name;
	uint8_t *(*make)(void);
	bool once;	/* copied once, whoever runs this */
};

static const char *says_private(void)
{
	const char *value = getenv("VHOST_RDMA_PRIVATE");

	return value && !strcmp(value, "1") ? value : NULL;
}

static uint8_t *map_file(int fd, size_t len, int flags, off_t offset)
{
	void *at = fd < 0 ? MAP_FAILED :
		   mmap(NULL, len, PROT_READ | PROT_WRITE, flags, fd, offset);

	return at == MAP_FAILED ? NULL : at;
}

static int memory_file(size_t len)
{
	int fd = memfd_create("memory", MFD_CLOEXEC);

	return fd >= 0 && !ftruncate(fd, (off_t)len) ? fd : -1;
}

/* On a disk; ENODEV where there is none, and all is shared memory. */
static int disk_file(size_t len)
{
	char name[] = "/var/tmp/process-private-XXXXXX";
	struct statfs system;
	int fd = mkstemp(name);

	if (fd >= 0)
		unlink(name);
	if (fd >= 0 && !fstatfs(fd, &system) && system.f_type == 0x01021994) {
		close(fd);
		errno = ENODEV;
		return -1;
	}
	return fd >= 0 && !ftruncate(fd, (off_t)len) ? fd : -1;
}

static uint8_t *of_memfd(void)
{
	return map_file(memory_file(2 * ROOM), 2 * ROOM, MAP_SHARED, 0);
}

/* From the middle of a file whose length is no page's. */
static uint8_t *of_odd_memfd(void)
{
	return map_file(memory_file(4096 + 2 * ROOM - 100), 2 * ROOM, MAP_SHARED, 4096);
}

/* As POSIX's manual has it: closed as soon as it is mapped, and unlinked or not. */
static uint8_t *of_shm(bool unlinked)
{
	char name[64];
	uint8_t *at;
	int fd;

	snprintf(name, sizeof(name), "/process-private-%d-%d", getpid(), unlinked);
	fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	if (fd >= 0 && ftruncate(fd, 2 * ROOM))
		return NULL;
	at = map_file(fd, 2 * ROOM, MAP_SHARED, 0);
	if (fd >= 0)
		close(fd);
	if (unlinked)
		shm_unlink(name);
	return at;
}

static uint8_t *of_named_shm(void)
{
	return of_shm(false);
}

static uint8_t *of_unlinked_shm(void)
{
	return of_shm(true);
}

static uint8_t *of_system_v(void)
{
	int id = shmget(IPC_PRIVATE, 2 * ROOM, IPC_CREAT | 0600);
	void *at = id < 0 ? (void *)-1 : shmat(id, NULL, 0);

	if (id >= 0)
		shmctl(id, IPC_RMID, NULL);
	return at == (void *)-1 ? NULL : at;
}

static uint8_t *of_nobody(void)
{
	return map_file(0, 2 * ROOM, MAP_SHARED | MAP_ANONYMOUS, 0);
}

static uint8_t *of_disk(void)
{
	return map_file(disk_file(2 * ROOM), 2 * ROOM, MAP_SHARED, 0);
}

static uint8_t *of_own_copy(void)
{
	return map_file(disk_file(2 * ROOM), 2 * ROOM, MAP_PRIVATE, 0);
}

static uint8_t *of_own_copy_of_memory(void)
{
	return map_file(memory_file(2 * ROOM), 2 * ROOM, MAP_PRIVATE, 0);
}

/* Two mappings side by side, of two files: each piece begins in one and ends in the other. */
static uint8_t *of_two_files(void)
{
	uint8_t *at = map(2 * ROOM, PROT_NONE), *middle = at + ROOM + 4096;
	int first = memory_file(ROOM + 4096), second = memory_file(ROOM);

	if (!at || mmap(at, ROOM + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, first,
			0) != at ||
	    mmap(middle, ROOM - 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, second,
		 4096) != middle)
		return NULL;
	return at;
}

/* One file, its second half first. */
static uint8_t *of_two_halves(void)
{
	uint8_t *at = map(2 * ROOM, PROT_NONE), *middle = at + ROOM + 4096;
	int fd = memory_file(2 * ROOM);

	if (!at || mmap(at, ROOM + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
			ROOM - 4096) != at ||
	    mmap(middle, ROOM - 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) !=
		    middle)
		return NULL;
	return at;
}

/* Half of it is a file's. */
static uint8_t *of_a_file_in_part(void)
{
	uint8_t *at = map(2 * ROOM, PROT_READ | PROT_WRITE), *middle = at + ROOM + 4096;
	int fd = memory_file(ROOM);

	if (!at || mmap(middle, ROOM - 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
			0) != middle)
		return NULL;
	return at;
}

/* NULL where the host has no huge page for it. */
static uint8_t *of_huge_pages(void)
{
	int fd = memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB);

	if (fd < 0 || ftruncate(fd, 2 << 20))
		return NULL;
	return map_file(fd, 2 << 20, MAP_SHARED, 0);
}

static uint8_t *of_own_huge_pages(void)
{
	return map_file(0, 2 << 20, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, 0);
}

static const struct mapping mappings[] = {
	{ "memfd", of_memfd, true },
	{ "memfd of an odd length", of_odd_memfd, true },
	{ "POSIX shared memory", of_named_shm, true },
	{ "mappings of two files", of_two_files, true },
	{ "a file's halves", of_two_halves, true },
	{ "POSIX shared memory, unlinked", of_unlinked_shm, false },
	{ "System V shared memory", of_system_v, false },
	{ "shared memory of nobody's", of_nobody, false },
	{ "shared file on a disk", of_disk, false },
	{ "private file on a disk", of_own_copy, false },
	{ "private mapping of a memfd", of_own_copy_of_memory, false },
	{ "a file's in part", of_a_file_in_part, false },
	{ "huge pages", of_huge_pages, true },
	{ "private huge pages", of_own_huge_pages, false },
};

/* Whether what is received in `far` is there before anybody polls for it. */
static bool arrives_at_once(uint8_t *far, bool *at_once)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL);
	struct ibv_sge list;
	struct ibv_wc wc;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	list = sge(far + AT, LEN, far_mr);
	fill(bss[0], ROOM, 11);
	memset(far, 0xee, ROOM);
	MUST(receive(&ends[1], 1, &list, 1));
	MUST(does(IBV_WR_SEND, sge(bss[0] + AT, LEN, near_mr), (struct remote){ 0 },
		  IBV_WC_SUCCESS));
	*at_once = !memcmp(far + AT, bss[0] + AT, LEN);
	TRY(*at_once || far[AT] == 0xee);
	MUST(done(&ends[1], &wc, IBV_WC_SUCCESS) && moved(bss[0], far));
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* A word of it, of a peer's atomics and the program's own. */
static bool adds(uint8_t *far)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL);
	uint64_t *word = (uint64_t *)(far + 4096 - 8), before;
	struct remote there = { word, far_mr, 2, 0 };

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	__atomic_store_n(word, 40, __ATOMIC_SEQ_CST);
	MUST(does(IBV_WR_ATOMIC_FETCH_AND_ADD, sge(bss[0], 8, near_mr), there, IBV_WC_SUCCESS));
	memcpy(&before, bss[0], 8);
	TRY(before == 40 && __atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST) == 43);
	there.first = 43;
	there.second = 7;
	MUST(does(IBV_WR_ATOMIC_CMP_AND_SWP, sge(bss[0], 8, near_mr), there, IBV_WC_SUCCESS));
	TRY(__atomic_load_n(word, __ATOMIC_SEQ_CST) == 7);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

static bool in_mapping(const struct mapping *of)
{
	uint8_t *memory = of->make();
	bool huge = strstr(of->name, "huge pages"), at_once = false;

	if (!memory && (huge || (strstr(of->name, "disk") && errno == ENODEV))) {
		printf("skip files: %s\n", of->name);
		return true;
	}
	TRY(memory);
	MUST(operate(memory, memory + ROOM) && operate(bss[0], memory) && operate(memory, bss[1]));
	MUST(adds(memory) && arrives_at_once(memory + ROOM, &at_once));
	if (says_private())
		TRY(!at_once);
	/* A privileged program can open again what it has closed (proc(5), map_files). */
	else if (of->once)
		TRY(at_once);
	if (strstr(of->name, "disk") || strstr(of->name, "private") || strstr(of->name, "part"))
		TRY(!at_once);
	if (strstr(of->name, "System V"))
		shmdt(memory);
	else
		munmap(memory, huge ? 2 << 20 : 2 * ROOM);
	return true;
}

static bool files(void)
{
	char text[sizeof(why)], name[64];
	bool ok = true;
	size_t i;

	for (i = 0; ok && i < sizeof(mappings) / sizeof(mappings[0]); i++) {
		ok = in_mapping(&mappings[i]);
		if (!ok) {
			memcpy(text, why, sizeof(text));
			fail("%s: %.180s", mappings[i].name, text);
		}
	}
	snprintf(name, sizeof(name), "/process-private-%d-0", getpid());
	shm_unlink(name);
	return ok;
}

/* Memory that a program may only read is a source of messages, whoever may write the file. */
static bool readable(void)
{
	char path[64];
	int fd = memory_file(ROOM), n;

	for (n = 0; n < 2; n++) {
		struct ibv_mr *mr, *far_mr;
		uint8_t *at;
		int of = fd;

		if (n) {
			snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
			of = open(path, O_RDONLY);
		}
		fill(bss[0], ROOM, 12);
		TRY(fd >= 0 && of >= 0 && pwrite(fd, bss[0], ROOM, 0) == ROOM);
		at = mmap(NULL, ROOM, PROT_READ, MAP_SHARED, of, 0);
		TRY(at != MAP_FAILED);
		if (n)
			close(fd);
		TRY(!ibv_reg_mr(ends[0].pd, at, ROOM, ALL) && errno == EFAULT);
		TRY((mr = ibv_reg_mr(ends[0].pd, at, ROOM, 0)));
		TRY((far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL)));
		MUST(make(IBV_QPT_RC, false, false));
		memset(bss[1], 0xee, ROOM);
		MUST(does(IBV_WR_RDMA_WRITE, sge(at + AT, LEN, mr),
			  (struct remote){ bss[1] + AT, far_mr, 0, 0 }, IBV_WC_SUCCESS));
		MUST(moved(bss[0], bss[1]));
		TRY(!ibv_dereg_mr(mr) && !ibv_dereg_mr(far_mr) && !munmap(at, ROOM));
		if (n)
			close(of);
	}
	return true;
}

/*
 * A region is what was there when it was registered: with another file at the same addresses it is
 * the old one's until it is deregistered, as pinned pages would be.
 */
static bool replaced(void)
{
	struct ibv_mr *near_mr, *old_mr, *new_mr;
	int old = memory_file(ROOM), new = memory_file(ROOM);
	uint8_t *at = map_file(old, ROOM, MAP_SHARED, 0), found[8];
	struct remote there;

	if (says_private())
		return true;
	TRY((near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL)));
	TRY(at && (old_mr = ibv_reg_mr(ends[1].pd, at, ROOM, ALL)));
	TRY(!munmap(at, ROOM));
	TRY(mmap(at, ROOM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, new, 0) == at);
	TRY((new_mr = ibv_reg_mr(ends[1].pd, at, ROOM, ALL)));
	MUST(make(IBV_QPT_RC, false, false));
	there = (struct remote){ at + 4096, old_mr, 0, 0 };
	memset(bss[0], 'o', 8);
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0], 8, near_mr), there, IBV_WC_SUCCESS));
	there.mr = new_mr;
	memset(bss[0], 'n', 8);
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0], 8, near_mr), there, IBV_WC_SUCCESS));
	TRY(at[4096] == 'n' && at[4096 + 7] == 'n');
	TRY(pread(old, found, 8, 4096) == 8 && found[0] == 'o' && found[7] == 'o');
	TRY(!ibv_dereg_mr(old_mr) && !ibv_dereg_mr(new_mr) && !ibv_dereg_mr(near_mr));
	munmap(at, ROOM);
	close(old);
	close(new);
	return true;
}

/* A program that cuts its file off has a region less, and nothing else. */
static bool cut(void)
{
	int fd = memory_file(ROOM), status = IBV_WC_SUCCESS;
	uint8_t *at = map_file(fd, ROOM, MAP_SHARED, 0);
	struct ibv_mr *near_mr, *far_mr;
	double begin = now();
	struct ibv_wc wc;

	if (says_private())
		return true;
	TRY((near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL)));
	TRY(at && (far_mr = ibv_reg_mr(ends[1].pd, at, ROOM, ALL)));
	MUST(make(IBV_QPT_RC, false, false));
	TRY(!ftruncate(fd, 4096));
	/* What finds it gone may end well or not. */
	while (status == IBV_WC_SUCCESS && now() - begin < WAIT_MS / 1e3) {
		MUST(post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, sge(bss[0], 8, near_mr),
			  (struct remote){ at + 8192, far_mr, 0, 0 }));
		status = next(&ends[0], &wc);
	}
	TRY(status == IBV_WC_REM_ACCESS_ERR);
	/* Once it is as long as it was it can be registered, beside the region that is lost. */
	TRY(!ftruncate(fd, ROOM));
	MUST(operate(bss[0], at));
	TRY(!ibv_dereg_mr(far_mr));
	MUST(operate(bss[0], at) && operate(bss[0], bss[1]));
	TRY(!ibv_dereg_mr(near_mr) && !munmap(at, ROOM) && !close(fd));
	return true;
}

/* A program's own mapping of a file may hang whoever touches it: the device has another. */
static bool unserved(void)
{
	struct ibv_mr *near_mr, *far_mr;
	int fd = memory_file(ROOM), uffd;
	uint8_t *at = map_file(fd, ROOM, MAP_SHARED, 0);
	double begin = now();

	if (says_private())
		return true;
	TRY((near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL)));
	TRY(at && hang(at, ROOM, &uffd));
	TRY((far_mr = ibv_reg_mr(ends[1].pd, at, ROOM, ALL)));
	MUST(make(IBV_QPT_RC, false, false));
	memset(bss[0], 0xee, ROOM);
	MUST(does(IBV_WR_RDMA_READ, sge(bss[0] + AT, LEN, near_mr),
		  (struct remote){ at + AT, far_mr, 0, 0 }, IBV_WC_SUCCESS));
	TRY(bss[0][AT - 1] == 0xee && !bss[0][AT] && !bss[0][AT + LEN - 1]);
	/* Sooner than a peer whose owner is asked in vain gives up. */
	TRY(now() - begin < 3);
	TRY(!ibv_dereg_mr(far_mr) && !ibv_dereg_mr(near_mr));
	TRY(!close(uffd) && !munmap(at, ROOM) && !close(fd));
	return true;
}

/* What a program has locked stays locked: its descriptors are used as they are. */
static bool locks(void)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10 };
	int fd = memory_file(2 * ROOM), status;
	uint8_t *at = map_file(fd, 2 * ROOM, MAP_SHARED, 0);
	pid_t pid;

	TRY(at && !fcntl(fd, F_SETLK, &lock));
	MUST(operate(bss[0], at) && operate(at, at + ROOM));
	pid = fork();
	if (!pid)
		_exit(!fcntl(fd, F_GETLK, &lock) && lock.l_type == F_WRLCK ? 5 : 6);
	TRY(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 5);
	TRY(!munmap(at, 2 * ROOM) && !close(fd));
	return true;
}

/* Far more regions, and files, than a session has pieces of memory; none is kept. */
static bool many_files(void)
{
	enum { MANY = 100, REGIONS_EACH = 5 };
	static struct ibv_mr *all[MANY][REGIONS_EACH];
	static uint8_t *memory[MANY];
	int i, n, lap;

	for (lap = 0; lap < 2; lap++) {
		for (i = 0; i < MANY; i++) {
			int fd = memory_file(ROOM);

			TRY((memory[i] = map_file(fd, ROOM, MAP_SHARED, 0)));
			for (n = 0; n < REGIONS_EACH; n++)
				TRY((all[i][n] = ibv_reg_mr(ends[1].pd, memory[i] + n * 1000, 1000,
							    ALL)));
			close(fd);
		}
		for (i = 0; i < MANY; i++) {
			for (n = 0; n < REGIONS_EACH; n++)
				TRY(!ibv_dereg_mr(all[i][n]));
			MUST(i % 30 || operate(bss[0], memory[i]));
			munmap(memory[i], ROOM);
		}
	}
	return true;
}
