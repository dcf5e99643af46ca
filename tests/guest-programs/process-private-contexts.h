/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Cases of process-private.c about contexts: their beginning and end, their doorbell pages, and the
 * names of devices.
 */

/* ---- Contexts come and go -------------------------------------------------------------------- */

enum { OPENINGS = 600, SHORT = 200, PAGES = 64, PAGE_SIZE = 4096 };

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

static void *list_on(void *unused)
{
	while (!over)
		ibv_free_device_list(ibv_get_device_list(NULL));
	return unused;
}

static void *open_on(void *unused)
{
	while (!over)
		if (!open_and_close(1))
			return ends;
	return unused;
}

/* Sockets of daemons, which have names; those between threads have none. */
static int connections(void)
{
	struct sockaddr_un peer;
	int fd, count = 0;

	for (fd = 0; fd < 1024; fd++) {
		socklen_t len = sizeof(peer);

		peer.sun_path[0] = 0;
		count += !getpeername(fd, (struct sockaddr *)&peer, &len) &&
			 peer.sun_family == AF_UNIX && len > sizeof(peer.sun_family) &&
			 peer.sun_path[0];
	}
	return count;
}

/* A child has none of its parent's sessions, whatever other threads do as it is made. */
static bool fork_beside(void)
{
	pthread_t lister, opener;
	void *failed = NULL;
	int i, status = 0;

	over = false;
	TRY(connections() >= 2);
	TRY(!pthread_create(&lister, NULL, list_on, NULL));
	TRY(!pthread_create(&opener, NULL, open_on, NULL));
	for (i = 0; i < 100 && !status; i++) {
		pid_t child = fork();

		if (!child)
			_exit(connections());
		if (child < 0 || waitpid(child, &status, 0) != child)
			status = -1;
	}
	over = true;
	pthread_join(lister, NULL);
	pthread_join(opener, &failed);
	return !failed && (status ? fail("child %d: %#x", i, status) : true);
}

/* A message from a QP to itself: both of its doorbells are heard. */
static bool echo(struct end *alone)
{
	struct ibv_send_wr *bad_send, send = { .opcode = IBV_WR_SEND };
	struct ibv_recv_wr *bad, receive = { .wr_id = 1 };
	struct ibv_wc wc;

	TRY(!(alone->srq ? ibv_post_srq_recv(alone->srq, &receive, &bad) :
			   ibv_post_recv(alone->qp, &receive, &bad)));
	TRY(!ibv_post_send(alone->qp, &send, &bad_send));
	return done(alone, &wc, IBV_WC_SUCCESS) && done(alone, &wc, IBV_WC_SUCCESS);
}

static bool echoes(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct end alone = ends[0];

	alone.qp = qp;
	alone.cq = cq;
	alone.srq = srq;
	return connect_qp(&alone, &alone) && echo(&alone);
}

/* A QP for messages to itself. */
static struct ibv_qp *make_alone(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr how = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .cap = { 1, srq ? 0 : 1, 1, 1, 0 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};

	return ibv_create_qp(ends[0].pd, &how);
}

/* The device looks at doorbells for as long as somebody rings. */
static void *ring_on(void *arg)
{
	struct end *alone = arg;

	while (!over && echo(alone))
		;
	return over ? NULL : arg;
}

/* What a context had is not written to any more when another has it. */
static bool is_left_alone(void)
{
	struct ibv_alloc_dm_attr how = { .length = PAGE_SIZE };
	static uint8_t full[PAGE_SIZE], found[PAGE_SIZE];
	struct ibv_context *ctx;
	struct ibv_dm *dm;
	int i;

	memset(full, 0xff, sizeof(full));
	for (i = 0; i < SHORT; i++) {
		TRY((ctx = ibv_open_device(ends[0].ctx->device)));
		TRY(!ibv_close_device(ctx));
		TRY((dm = ibv_alloc_dm(ends[1].ctx, &how)));
		TRY(!ibv_memcpy_to_dm(dm, 0, full, sizeof(full)));
		usleep(200);
		TRY(!ibv_memcpy_from_dm(found, dm, 0, sizeof(found)));
		TRY(!memcmp(found, full, sizeof(full)));
		TRY(!ibv_free_dm(dm));
	}
	return true;
}

static bool pages_of_others(void)
{
	struct end alone = ends[0];
	void *failed = NULL;
	pthread_t other;
	bool ok;

	TRY((alone.cq = ibv_create_cq(alone.ctx, 4, NULL, NULL, 0)));
	TRY((alone.qp = make_alone(alone.cq, NULL)));
	MUST(connect_qp(&alone, &alone));
	over = false;
	TRY(!pthread_create(&other, NULL, ring_on, &alone));
	ok = is_left_alone();
	over = true;
	pthread_join(other, &failed);
	TRY(!ibv_destroy_qp(alone.qp) && !ibv_destroy_cq(alone.cq));
	return ok && !failed;
}

/* ---- Doorbell pages -------------------------------------------------------------------------- */

/* Of a page's 960 slots a QP has two: six pages, more than a context gets in reserve. */
enum { MAKERS = 4, EACH = 650, SRQS = 1200 };

struct maker {
	struct ibv_cq *cq;
	struct ibv_qp *qps[EACH];
	int error;
};

static pthread_barrier_t makers_ready;

/*
 * Whoever lets go of a lock may be kept off the CPU there: what he does next comes late, as it does
 * on a machine that is busy. The library calls this one, and not the C library's.
 */
static bool busy_machine;

int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
	static int (*of_libc)(pthread_mutex_t *mutex);
	static _Thread_local unsigned int times;
	int ret;

	if (!of_libc)
		*(void **)&of_libc = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
	ret = of_libc(mutex);
	if (__atomic_load_n(&busy_machine, __ATOMIC_RELAXED) && rand_r(&times) % 3 == 0)
		usleep(200);
	return ret;
}

static void *make_qps(void *arg)
{
	struct maker *own = arg;
	int i;

	pthread_barrier_wait(&makers_ready);
	for (i = 0; i < EACH; i++) {
		own->qps[i] = make_alone(own->cq, NULL);
		if (!own->qps[i]) {
			own->error = errno;
			return NULL;
		}
	}
	return NULL;
}

static bool all_speak(struct maker *of)
{
	int i, n;

	for (n = 0; n < MAKERS; n++) {
		for (i = 0; i < EACH; i++) {
			if (!of[n].qps[i])
				return fail("QP %d: errno %d", n * EACH + i, of[n].error);
			/* All would take their time: those of every page are among these. */
			if (i % 13 == 0 || i == EACH - 1)
				MUST(echoes(of[n].qps[i], of[n].cq, NULL));
		}
	}
	return true;
}

/* Threads that need doorbell pages at the same time. */
static bool many_queues(void)
{
	static struct maker of[MAKERS];
	pthread_t threads[MAKERS];
	bool ok;
	int i, n;

	memset(of, 0, sizeof(of));
	TRY(!pthread_barrier_init(&makers_ready, NULL, MAKERS));
	for (n = 0; n < MAKERS; n++)
		TRY((of[n].cq = ibv_create_cq(ends[0].ctx, 8, NULL, NULL, 0)));
	__atomic_store_n(&busy_machine, true, __ATOMIC_RELAXED);
	for (n = 0; n < MAKERS; n++)
		TRY(!pthread_create(&threads[n], NULL, make_qps, &of[n]));
	for (n = 0; n < MAKERS; n++)
		pthread_join(threads[n], NULL);
	__atomic_store_n(&busy_machine, false, __ATOMIC_RELAXED);
	ok = all_speak(of);
	for (n = 0; n < MAKERS; n++) {
		for (i = 0; i < EACH && of[n].qps[i]; i++)
			TRY(!ibv_destroy_qp(of[n].qps[i]));
		TRY(!ibv_destroy_cq(of[n].cq));
	}
	pthread_barrier_destroy(&makers_ready);
	return ok;
}

static bool is_heard(struct ibv_srq *srq)
{
	struct ibv_cq *cq = ibv_create_cq(ends[0].ctx, 4, NULL, NULL, 0);
	struct ibv_qp *qp = cq ? make_alone(cq, srq) : NULL;
	bool ok;

	TRY(qp);
	ok = echoes(qp, cq, srq);
	TRY(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
	return ok;
}

static bool many_srqs(void)
{
	struct ibv_srq_init_attr how = { .attr = { .max_wr = 1, .max_sge = 1 } };
	static struct ibv_srq *srqs[SRQS];
	bool ok = true;
	int i, made;

	for (made = 0; made < SRQS; made++) {
		srqs[made] = ibv_create_srq(ends[0].pd, &how);
		if (!srqs[made]) {
			ok = fail("SRQ %d: errno %d", made, errno);
			break;
		}
	}
	for (i = 0; ok && i < made; i += 109)
		ok = is_heard(srqs[i]);
	ok = ok && is_heard(srqs[made - 1]);
	for (i = 0; i < made; i++)
		TRY(!ibv_destroy_srq(srqs[i]));
	return ok;
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* The device of this name has the address of an end, whoever opens it. */
static bool is_of(struct ibv_device **list, const char *name, const struct end *end)
{
	struct ibv_context *ctx;
	union ibv_gid gid;
	int same;

	for (; *list && strcmp(ibv_get_device_name(*list), name); list++)
		;
	if (!*list)
		return fail("there is no %s", name);
	TRY(ibv_get_device_guid(*list) == ibv_get_device_guid(end->ctx->device));
	TRY((ctx = ibv_open_device(*list)));
	same = !ibv_query_gid(ctx, 1, 0, &gid) && !memcmp(&gid, &end->gid, sizeof(gid));
	TRY(!ibv_close_device(ctx));
	return same ? true : fail("%s is another device", name);
}

/* Which of the ends' devices are there, and no other. */
static bool listed(const char *paths, bool first, bool second)
{
	bool there[2] = { first, second };
	struct ibv_device **list;
	int i, count = 0, found;
	bool ok = true;

	TRY(!setenv("VHOST_RDMA_DEVICES", paths, 1));
	TRY((list = ibv_get_device_list(&found)));
	for (i = 0; ok && i < 2; i++) {
		if (!there[i])
			continue;
		ok = is_of(list, ibv_get_device_name(ends[i].ctx->device), &ends[i]);
		count++;
	}
	ibv_free_device_list(list);
	TRY(!ok || found == count);
	return ok;
}

/* A path where another socket is than before: another device. */
static bool other_socket(const char *first, const char *second)
{
	const char *path = "/tmp/process-private.sock";
	struct ibv_device **before, **after;
	struct ibv_context *ctx;
	char name[64];

	(void)unlink(path);
	TRY(!setenv("VHOST_RDMA_DEVICES", path, 1) && !symlink(first, path));
	TRY((before = ibv_get_device_list(NULL)) && before[0] && !before[1]);
	MUST(is_of(before, ibv_get_device_name(before[0]), &ends[0]));
	snprintf(name, sizeof(name), "%s", ibv_get_device_name(before[0]));
	TRY(!unlink(path) && !symlink(second, path));
	/* Whoever still has the old one does not get the other by it. */
	ctx = ibv_open_device(before[0]);
	if (ctx)
		ibv_close_device(ctx);
	TRY(!ctx);
	TRY((after = ibv_get_device_list(NULL)) && after[0] && !after[1]);
	TRY(strcmp(ibv_get_device_name(after[0]), name));
	MUST(is_of(after, ibv_get_device_name(after[0]), &ends[1]));
	TRY(!unlink(path));
	ibv_free_device_list(before);
	ibv_free_device_list(after);
	return true;
}

/* NICs come and go between two listings: a device stays what it is, and no name is another's. */
static bool names(void)
{
	char *all = strdup(getenv("VHOST_RDMA_DEVICES") ? : ""), *second, *both, *gap;
	bool ok;

	TRY(all && (second = strchr(all, ':')) && !strchr(second + 1, ':'));
	*second++ = 0;
	TRY(asprintf(&both, "%s:%s", all, second) > 0);
	TRY(asprintf(&gap, "%s:/nowhere:%s", second, all) > 0);
	ok = listed(both, true, true) && listed(second, false, true) &&
	     listed(both, true, true) && listed(all, true, false) && listed(gap, true, true) &&
	     other_socket(all, second) && listed(both, true, true);
	setenv("VHOST_RDMA_DEVICES", both, 1);
	free(gap);
	free(both);
	free(all);
	return ok;
}
