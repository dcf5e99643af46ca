// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A part of process-calls.c: what objects cost, and a full table of descriptors.
 */
/* Rings of many MiB, made, resized and ended, again and again. */
static void large(void)
{
	struct ibv_context *context = open_device();
	struct ibv_device_attr attr;
	int before = 0;

	MUST(!ibv_query_device(context, &attr));
	MUST(attr.max_cqe >= 200000);
	for (int i = 0; i < 200; i++) {
		struct ibv_cq *cq = ibv_create_cq(context, 200000, NULL, NULL, 0);

		if (!cq)
			fail("the large CQ number %d: errno %d", i, errno);
		if (i % 4 == 1)
			MUST(!ibv_resize_cq(cq, 16) && !ibv_resize_cq(cq, 200000));
		MUST(!ibv_destroy_cq(cq));
		if (i == 8)
			before = descriptors();
	}
	if (descriptors() != before)
		fail("%d descriptors more than before", descriptors() - before);
}

/* As many channels as connections of a server have: two with each. */
static void channels(void)
{
	enum { MANY = 600 };
	struct ibv_context *context = open_device();
	static struct ibv_comp_channel *made[MANY];
	static struct rdma_event_channel *events[MANY / 2];
	struct rlimit limit;

	MUST(!getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
	MUST(!setrlimit(RLIMIT_NOFILE, &limit));
	for (int i = 0; i < MANY; i++)
		if (!(made[i] = ibv_create_comp_channel(context)))
			fail("completion channel %d: errno %d", i, errno);
	for (int i = 0; i < MANY / 2; i++)
		if (!(events[i] = rdma_create_event_channel()))
			fail("event channel %d: errno %d", i, errno);
	for (int i = 0; i < MANY; i++)
		MUST(!ibv_destroy_comp_channel(made[i]));
	for (int i = 0; i < MANY / 2; i++)
		rdma_destroy_event_channel(events[i]);
}

/* Leaves so many descriptors; what was taken is in `taken`. */
static int fill(int *taken, int most, int leave)
{
	int count = 0;

	while (count < most && (taken[count] = dup(STDERR_FILENO)) >= 0)
		count++;
	MUST(errno == EMFILE && count > leave);
	while (leave--)
		close(taken[--count]);
	return count;
}

/* Memory that is the program's own, and in no shared heap. */
static char own[4096];

static void full(void)
{
	enum { MOST = 256 };
	struct rlimit few = { .rlim_cur = MOST, .rlim_max = MOST };
	struct queues q = begin();
	int taken[MOST], count;
	struct ibv_comp_channel *channel;
	struct rdma_event_channel *events;
	struct ibv_mr *mr;

	MUST((events = rdma_create_event_channel()));
	rdma_destroy_event_channel(events);
	MUST(!setrlimit(RLIMIT_NOFILE, &few));
	for (int round = 0; round < 1500; round++) {
		/* For a channel two are needed. */
		count = fill(taken, MOST, round % 2);
		errno = 0;
		MUST(!ibv_create_comp_channel(q.context) && errno == EMFILE);
		errno = 0;
		MUST(!rdma_create_event_channel() && errno == EMFILE);
		mr = round % 2 ? NULL : ibv_reg_mr(q.pd, own, sizeof(own), IBV_ACCESS_LOCAL_WRITE);
		MUST(!mr && errno == EMFILE);
		while (count)
			close(taken[--count]);
	}
	/* Nothing has been lost by that. */
	MUST((channel = ibv_create_comp_channel(q.context)));
	MUST((events = rdma_create_event_channel()));
	MUST((mr = ibv_reg_mr(q.pd, own, sizeof(own), IBV_ACCESS_LOCAL_WRITE)));
	MUST(!ibv_dereg_mr(mr) && !ibv_destroy_comp_channel(channel));
	rdma_destroy_event_channel(events);
}

/* Other threads take what there is, all the time. */
static atomic_bool greedy_ends;

static void *be_greedy(void *unused)
{
	(void)unused;
	while (!greedy_ends) {
		int fd = dup(STDERR_FILENO);

		if (fd >= 0)
			close(fd);
	}
	return NULL;
}

static void greedy(void)
{
	enum { MOST = 256 };
	struct rlimit few = { .rlim_cur = MOST, .rlim_max = MOST };
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	int taken[MOST], count, refused = 0;
	struct ibv_comp_channel *channel;
	struct ibv_mr *mr = NULL;
	pthread_t thieves[2];

	MUST(pd && !setrlimit(RLIMIT_NOFILE, &few));
	count = fill(taken, MOST, 3);
	for (int i = 0; i < 2; i++)
		MUST(!pthread_create(&thieves[i], NULL, be_greedy, NULL));
	/* More than there may be, if each that failed left one behind. */
	for (int i = 0; i < 3000; i++) {
		channel = ibv_create_comp_channel(context);
		if (!channel) {
			MUST(errno == EMFILE);
			refused++;
		} else {
			MUST(!ibv_destroy_comp_channel(channel));
		}
		if (mr)
			MUST(!ibv_dereg_mr(mr));
		mr = ibv_reg_mr(pd, own, sizeof(own), IBV_ACCESS_LOCAL_WRITE);
		MUST(mr || errno == EMFILE);
	}
	greedy_ends = true;
	for (int i = 0; i < 2; i++)
		pthread_join(thieves[i], NULL);
	while (count)
		close(taken[--count]);
	if (!refused)
		fail("there was always room");
	MUST((channel = ibv_create_comp_channel(context)));
	MUST(mr || (mr = ibv_reg_mr(pd, own, sizeof(own), IBV_ACCESS_LOCAL_WRITE)));
}

/* A queue pair has room for as many inline bytes as it says, asked for or not. */
static void inlined(void)
{
	struct queues q = begin();
	struct ibv_cq *cq = ibv_create_cq(q.context, 16, NULL, NULL, 0);

	for (uint32_t sges = 1; sges <= 4; sges++) {
		struct ibv_qp_init_attr init = {
			.send_cq = cq,
			.recv_cq = cq,
			.qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = sges,
				 .max_recv_sge = 1 },
		};
		struct ibv_qp_init_attr found;
		struct ibv_qp_attr attr;
		struct ibv_qp *qp = ibv_create_qp(q.pd, &init);

		MUST(qp && !ibv_query_qp(qp, &attr, IBV_QP_CAP, &found));
		/* A scatter-gather element is 16 bytes, and their place is the data's. */
		if (init.cap.max_inline_data < 16 * sges)
			fail("%u elements: %u bytes", sges, init.cap.max_inline_data);
		MUST(found.cap.max_inline_data == init.cap.max_inline_data);
		MUST(!ibv_destroy_qp(qp));
	}
}
