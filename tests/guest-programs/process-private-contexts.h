/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Cases of process-private.c about contexts: their beginning and end, their doorbell pages, and the
 * names of devices.
 */

/* ---- Contexts come and go -------------------------------------------------------------------- */

enum { OPENINGS = 1000, SHORT = 200, PAGES = 64, PAGE_SIZE = 4096 };

static volatile bool over;

/* Maps and unmaps pages, and counts those in which something else stands than was written. */
static void *map_and_look(void *count)
{
	uint8_t *pages[PAGES] = { NULL };
	size_t i;

	for (i = 0; !over; i = (i + 1) % PAGES) {
		if (pages[i]) {
			*(int *)count += *(volatile uint8_t *)pages[i] != 0x5a;
			munmap(pages[i], PAGE_SIZE);
		}
		pages[i] = map(PAGE_SIZE, PROT_READ | PROT_WRITE);
		if (pages[i])
			*(volatile uint8_t *)pages[i] = 0x5a;
	}
	for (i = 0; i < PAGES; i++)
		if (pages[i])
			munmap(pages[i], PAGE_SIZE);
	return NULL;
}

/* All that is mapped, in bytes. */
static size_t mapped(void)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned long from, to;
	size_t all = 0;

	while (maps && fscanf(maps, "%lx-%lx%*[^\n]", &from, &to) == 2)
		all += to - from;
	if (maps)
		fclose(maps);
	return all;
}

static int descriptors(void)
{
	int fd, count = 0;

	for (fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static bool open_and_close(int times)
{
	struct ibv_device *device = ends[0].ctx->device;
	struct ibv_context *ctx;
	int i;

	for (i = 0; i < times; i++) {
		TRY((ctx = ibv_open_device(device)));
		TRY(!ibv_close_device(ctx));
	}
	return true;
}

/* A context leaves nothing behind, and touches nothing that is not its own. */
static bool reopened(void)
{
	int replaced = 0, fds, left;
	size_t before, size;
	pthread_t other;
	bool ok;

	/* What is made once is there then. */
	MUST(open_and_close(8));
	fds = descriptors();
	before = mapped();
	MUST(open_and_close(SHORT));
	size = mapped();
	left = descriptors() - fds;
	over = false;
	TRY(!pthread_create(&other, NULL, map_and_look, &replaced));
	ok = open_and_close(OPENINGS - SHORT);
	over = true;
	pthread_join(other, NULL);
	MUST(ok);
	if (replaced || left || size > before + 16 * PAGE_SIZE)
		return fail("%d pages replaced, %d descriptors left, %zd bytes", replaced, left,
			    (ssize_t)(size - before));
	return true;
}
