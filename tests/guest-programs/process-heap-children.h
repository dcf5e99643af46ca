// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Cases of process-heap.c: threads, and children of fork.
 */
#ifndef PROCESS_HEAP_CHILDREN_H
#define PROCESS_HEAP_CHILDREN_H

#define SHELF 64

struct slot {
	uint8_t *ptr;
	size_t size;
	uint64_t word;
};

static struct slot shelf[SHELF];
static pthread_mutex_t shelf_lock = PTHREAD_MUTEX_INITIALIZER;
static bool over;

/* Blocks of all sizes, of which many are freed by another thread. */
static void *busy(void *arg)
{
	uint64_t state = seed * ((uintptr_t)arg + 1);
	struct slot mine = {}, other;
	unsigned int turn;
	uint8_t *ptr;
	size_t at;

	for (turn = 0; turn < 30000 && !__atomic_load_n(&over, __ATOMIC_RELAXED); turn++) {
		if (mine.ptr && any(&state) % 4 == 0) {
			at = mine.size < 200 * KIB ? mine.size * 2 : mine.size / 3;
			ptr = realloc(mine.ptr, at);
			if (!ptr || !marked(ptr, 8, PAGE, mine.word))
				return "realloc";
			mine.ptr = ptr;
			mine.size = at;
			mark(mine.ptr, mine.size, PAGE, mine.word);
		}
		at = any(&state) % SHELF;
		pthread_mutex_lock(&shelf_lock);
		other = shelf[at];
		shelf[at] = mine;
		pthread_mutex_unlock(&shelf_lock);
		if (other.ptr && !marked(other.ptr, other.size, PAGE, other.word))
			return "what was in a block";
		free(other.ptr);
		mine.word = any(&state);
		mine.size = 16 + any(&state) % ((size_t)1 << (5 + any(&state) % 15));
		mine.ptr = malloc(mine.size);
		if (!mine.ptr)
			return "malloc";
		mark(mine.ptr, mine.size, PAGE, mine.word);
	}
	free(mine.ptr);
	return NULL;
}

static bool threads(void)
{
	pthread_t all[4];
	void *said;
	size_t i;

	for (i = 0; i < 4; i++)
		TRY(!pthread_create(&all[i], NULL, busy, (void *)i));
	for (i = 0; i < 4; i++) {
		TRY(!pthread_join(all[i], &said));
		if (said)
			return fail("a thread: %s", (char *)said);
	}
	for (i = 0; i < SHELF; i++) {
		free(shelf[i].ptr);
		shelf[i].ptr = NULL;
	}
	TRY(resident() < SLACK);
	return true;
}

/* What a child's is: its parent's, and its own. */
static bool in_child(uint8_t *const *blocks, size_t n)
{
	size_t i;

	/* What its parent reserved or freed and nobody wrote to is not copied. */
	TRY(resident() < SLACK);
	for (i = 0; i < n; i++) {
		TRY(marked(blocks[i], MIB, PAGE, i));
		mark(blocks[i], MIB, PAGE, 1000 + i);
	}
	free(blocks[0]);
	for (i = 0; i < 100; i++) {
		kept = get(i * 1000);
		TRY(kept && in_heap(kept));
		memset(kept, 9, i * 1000);
		if (i % 2)
			free(kept);
	}
	return true;
}

static bool wait_for(pid_t child)
{
	int status;

	TRY(waitpid(child, &status, 0) == child);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		return fail("a child: status %#x", (unsigned int)status);
	return true;
}

static bool forks(void)
{
	uint8_t *blocks[8], *wide = get(400 * MIB), *gone;
	size_t i;
	pid_t child;

	TRY(wide);
	wide[0] = wide[300 * MIB] = 5;
	for (i = 0; i < 8; i++) {
		TRY((blocks[i] = get(MIB)));
		mark(blocks[i], MIB, PAGE, i);
		gone = get(30 * MIB);
		TRY(gone);
		memset(gone, 1, 30 * MIB);
		free(gone);
	}
	fflush(NULL);
	child = fork();
	TRY(child >= 0);
	if (!child) {
		if (in_child(blocks, 8) && wide[0] == 5 && !wide[1] && wide[300 * MIB] == 5)
			_exit(0);
		dprintf(2, "%s\n", why);
		_exit(1);
	}
	if (!wait_for(child))
		return false;
	for (i = 0; i < 8; i++)
		TRY(marked(blocks[i], MIB, PAGE, i));
	free_all((void **)blocks, 8);
	free(wide);
	return true;
}

static bool forks_beside_threads(void)
{
	pthread_t all[2];
	uint8_t *block;
	void *said;
	size_t i;
	pid_t child;

	over = false;
	for (i = 0; i < 2; i++)
		TRY(!pthread_create(&all[i], NULL, busy, (void *)i));
	for (i = 0; i < 40; i++) {
		block = get(100 * KIB);
		TRY(block);
		mark(block, 100 * KIB, PAGE, i);
		child = fork();
		TRY(child >= 0);
		if (!child) {
			bool good = marked(block, 100 * KIB, PAGE, i);

			free(block);
			block = malloc(300 * KIB);
			if (block)
				memset(block, 1, 300 * KIB);
			_exit(!good || !block);
		}
		if (!wait_for(child))
			return false;
		TRY(marked(block, 100 * KIB, PAGE, i));
		free(block);
	}
	__atomic_store_n(&over, true, __ATOMIC_RELAXED);
	for (i = 0; i < 2; i++) {
		TRY(!pthread_join(all[i], &said));
		if (said)
			return fail("a thread: %s", (char *)said);
	}
	return true;
}

/* A child, its child, and what they do with their heaps, which are no files. */
static bool fork_twice(const uint8_t *block)
{
	uint8_t *other;
	pid_t child = fork();

	TRY(child >= 0);
	if (child)
		return wait_for(child);
	other = malloc(64 * MIB);
	if (!marked(block, MIB, PAGE, 21) || !other || !in_heap(other))
		_exit(1);
	memset(other, 7, 64 * MIB);
	child = fork();
	if (!child) {
		if (other[5] != 7)
			_exit(1);
		memset(other, 8, 64 * MIB);
		free(other);
		other = calloc(64, MIB);
		_exit(!other || !is_zero(other, 64 * MIB));
	}
	_exit(child < 0 || !wait_for(child) || other[5] != 7);
}

static bool forks_without_a_file(void)
{
	struct rlimit size, files, none = { MIB, 0 };
	uint8_t *block = get(MIB);
	bool done;

	TRY(block && in_heap(block));
	mark(block, MIB, PAGE, 21);
	TRY(!getrlimit(RLIMIT_FSIZE, &size) && !getrlimit(RLIMIT_NOFILE, &files));
	none.rlim_max = size.rlim_max;
	TRY(!setrlimit(RLIMIT_FSIZE, &none));
	done = fork_twice(block);
	TRY(!setrlimit(RLIMIT_FSIZE, &size));
	if (!done)
		return false;
	none = (struct rlimit){ 0, files.rlim_max };
	TRY(!setrlimit(RLIMIT_NOFILE, &none));
	done = fork_twice(block);
	TRY(!setrlimit(RLIMIT_NOFILE, &files));
	TRY(!done || marked(block, MIB, PAGE, 21));
	free(block);
	return done;
}

/* A daemon closes what it does not know, and opens files of its own. */
static bool closed(void)
{
	uint8_t *block = get(MIB);
	struct stat is;
	size_t len;
	void *start;
	int fd = vrdma_heap(&start, &len), null = open("/dev/null", O_RDWR);
	pid_t child;

	TRY(block && fd >= 0 && null >= 0);
	mark(block, MIB, PAGE, 3);
	TRY(dup2(null, fd) == fd);
	TRY(vrdma_heap(&start, &len) == -1);
	child = fork();
	TRY(child >= 0);
	if (!child)
		_exit(!marked(block, MIB, PAGE, 3) || fstat(fd, &is) || !S_ISCHR(is.st_mode));
	if (!wait_for(child))
		return false;
	free(block);
	kept = get(64 * MIB);
	TRY(kept && in_heap(kept));
	free(kept);
	return true;
}

#endif
