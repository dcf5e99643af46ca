/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Cases of process-private.c: queues, registrations, processes; and the measurement. */

/* ---- Windows --------------------------------------------------------------------------------- */

/*
 * Has a window of the second end cover a part of memory: type 1 by ibv_bind_mw(), 2 by a request.
 */
static bool bind_window(struct ibv_mw *mw, struct ibv_mw_bind_info info, enum ibv_wc_status wanted)
{
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = info };
	struct ibv_send_wr *bad, wr = {
		.opcode = IBV_WR_BIND_MW,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_mw = { .mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = info },
	};
	struct ibv_wc wc;

	if (mw->type == IBV_MW_TYPE_1) {
		TRY(!ibv_bind_mw(ends[1].qp, mw, &bind));
	} else {
		TRY(!ibv_post_send(ends[1].qp, &wr, &bad));
		mw->rkey = wr.bind_mw.rkey;
	}
	return done(&ends[1], &wc, wanted);
}

/* What a peer does through a window reaches the program's own memory, there and nowhere else. */
static bool through(struct ibv_mr *near_mr, uint8_t *far, const struct ibv_mw *mw)
{
	const struct ibv_mr named = { .rkey = mw->rkey };
	struct remote there = { far + AT, &named, 3, 0 };
	uint64_t word = 40, before;

	fill(bss[0], ROOM, 8);
	memset(far, 0xee, ROOM);
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0] + AT, LEN, near_mr), there, IBV_WC_SUCCESS));
	MUST(moved(bss[0], far));
	fill(far, ROOM, 9);
	memset(bss[0], 0xee, ROOM);
	MUST(does(IBV_WR_RDMA_READ, sge(bss[0] + AT, LEN, near_mr), there, IBV_WC_SUCCESS));
	MUST(moved(far, bss[0]));
	memcpy(far + AT, &word, 8);
	MUST(does(IBV_WR_ATOMIC_FETCH_AND_ADD, sge(bss[0] + 8, 8, near_mr), there, IBV_WC_SUCCESS));
	memcpy(&before, bss[0] + 8, 8);
	memcpy(&word, far + AT, 8);
	TRY(before == 40 && word == 43);
	/* A byte before the window, though the region has it. */
	there.addr = far + AT - 8;
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0], 16, near_mr), there, IBV_WC_REM_ACCESS_ERR));
	return true;
}

/* Windows of both types on private memory; they move, and what is past the region has none. */
static bool windows(void)
{
	const enum ibv_mw_type types[] = { IBV_MW_TYPE_1, IBV_MW_TYPE_2 };
	uint8_t *far = map(2 * ROOM, PROT_READ | PROT_WRITE);
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, 2 * ROOM, BINDS);
	struct ibv_mw_bind_info info = { .mr = far_mr,
					 .mw_access_flags = ALL & ~IBV_ACCESS_LOCAL_WRITE };
	int i, turn;

	TRY(far && near_mr && far_mr);
	for (i = 0; i < 2; i++) {
		struct ibv_mw *mw = ibv_alloc_mw(ends[1].pd, types[i]);

		TRY(mw);
		for (turn = 0; turn < 2; turn++) {
			uint8_t *at = far + turn * ROOM;

			MUST(make(IBV_QPT_RC, false, false));
			info.addr = (uintptr_t)at + AT;
			info.length = LEN;
			/* One of type 2 is of the queue pair that is gone. */
			if (turn && mw->type == IBV_MW_TYPE_2) {
				TRY(!ibv_dealloc_mw(mw) &&
				    (mw = ibv_alloc_mw(ends[1].pd, types[i])));
			}
			MUST(bind_window(mw, info, IBV_WC_SUCCESS) && through(near_mr, at, mw));
		}
		/* The shadow is larger than what was registered. */
		MUST(make(IBV_QPT_RC, false, false));
		TRY(!ibv_dealloc_mw(mw) && (mw = ibv_alloc_mw(ends[1].pd, types[i])));
		info.addr = (uintptr_t)far + 2 * ROOM - 8;
		info.length = 16;
		MUST(bind_window(mw, info, IBV_WC_MW_BIND_ERR));
		TRY(!ibv_dealloc_mw(mw));
	}
	drop();
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	munmap(far, 2 * ROOM);
	return true;
}

/* A completion is of all reads before it too. */
static bool unsignaled(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	struct ibv_wc wc;
	int i, lap;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (lap = 0; lap < 30; lap++) {
		fill(bss[1], ROOM, (unsigned int)lap);
		memset(bss[0], 0xee, ROOM);
		for (i = 0; i < 8; i++)
			MUST(post(IBV_WR_RDMA_READ, i == 7 ? IBV_SEND_SIGNALED : 0,
				  sge(bss[0] + 1000 * i, 999, near_mr),
				  (struct remote){ bss[1] + 1000 * i, far_mr, 0, 0 }));
		MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
		for (i = 0; i < 8; i++)
			TRY(!memcmp(bss[0] + 1000 * i, bss[1] + 1000 * i, 999) &&
			    bss[0][1000 * i + 999] == 0xee);
	}
	/* Those before one that fails have arrived. */
	memset(bss[0], 0xee, ROOM);
	MUST(post(IBV_WR_RDMA_READ, 0, sge(bss[0], 999, near_mr),
		  (struct remote){ bss[1], far_mr, 0, 0 }));
	MUST(does(IBV_WR_RDMA_READ, sge(bss[0] + 1000, 999, near_mr),
		  (struct remote){ past(bss[1], 100000), far_mr, 0, 0 }, IBV_WC_REM_ACCESS_ERR));
	TRY(!memcmp(bss[0], bss[1], 999) && bss[0][1000] == 0xee);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* A fenced request sends what a read before it brings, and what lies beside that. */
static bool fenced(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	uint8_t *near = bss[0], *far = bss[1];
	struct ibv_wc wc;
	int lap;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (lap = 0; lap < 200; lap++) {
		fill(near, ROOM, (unsigned int)lap);
		fill(far, ROOM, (unsigned int)lap + 100);
		MUST(post(IBV_WR_RDMA_READ, 0, sge(near + 500, 1000, near_mr),
			  (struct remote){ far + 3000, far_mr, 0, 0 }));
		MUST(post(IBV_WR_RDMA_READ, 0, sge(near + 2000, 700, near_mr),
			  (struct remote){ far + 5000, far_mr, 0, 0 }));
		MUST(post(IBV_WR_RDMA_WRITE, IBV_SEND_FENCE, sge(near + 600, 100, near_mr),
			  (struct remote){ far + 9000, far_mr, 0, 0 }));
		MUST(post(IBV_WR_RDMA_WRITE, IBV_SEND_FENCE, sge(near + 4000, 100, near_mr),
			  (struct remote){ far + 9500, far_mr, 0, 0 }));
		MUST(post(IBV_WR_RDMA_WRITE, IBV_SEND_FENCE | IBV_SEND_SIGNALED,
			  sge(near, 3000, near_mr), (struct remote){ far, far_mr, 0, 0 }));
		MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
		TRY(!memcmp(near + 500, far + 3000, 1000) && !memcmp(near + 2000, far + 5000, 700));
		TRY(!memcmp(near, far, 3000));
		TRY(!memcmp(far + 9000, near + 600, 100) && !memcmp(far + 9500, near + 4000, 100));
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* Slots of the shared queue are posted again before what arrived in them is polled. */
static bool shared_queue(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	struct ibv_sge list;
	struct ibv_wc wc;
	int i, round;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, true, false));
	fill(bss[0], ROOM, 6);
	memset(bss[1], 0xee, ROOM);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < 8; i++) {
			list = sge(bss[1] + 400 * (8 * round + i), 400, far_mr);
			MUST(receive(&ends[1], (uint64_t)(8 * round + i), &list, 1));
		}
		for (i = 0; i < 8; i++)
			MUST(does(IBV_WR_SEND,
				  sge(bss[0] + 400 * (8 * round + i), (uint32_t)(100 + i), near_mr),
				  (struct remote){ 0 }, IBV_WC_SUCCESS));
	}
	for (i = 0; i < 24; i++) {
		MUST(done(&ends[1], &wc, IBV_WC_SUCCESS));
		TRY(wc.wr_id == (uint64_t)i && wc.byte_len == (uint32_t)(100 + i % 8));
		TRY(!memcmp(bss[1] + 400 * i, bss[0] + 400 * i, wc.byte_len));
		TRY(bss[1][400 * i + (int)wc.byte_len] == 0xee);
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

static bool next_ex(struct end *e)
{
	struct ibv_poll_cq_attr attr = { 0 };
	double end = now() + WAIT_MS / 1e3;

	while (ibv_start_poll(e->cq_ex, &attr))
		TRY(now() < end);
	TRY(e->cq_ex->status == IBV_WC_SUCCESS);
	return true;
}

/* ibv_wr_* and ibv_start_poll(). */
static bool extended(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	struct ibv_sge list[2];
	struct ibv_qp_ex *qp;
	struct ibv_wc wc;
	uint64_t word = 5;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, true));
	fill(bss[0], ROOM, 7);
	memset(bss[0] + 4000, 0xee, 2000);
	memset(bss[1], 0xee, ROOM);
	memcpy(bss[1] + 4096, &word, 8);
	list[0] = sge(bss[1], 300, far_mr);
	MUST(receive(&ends[1], 1, list, 1));
	qp = ibv_qp_to_qp_ex(ends[0].qp);
	TRY(qp);
	ibv_wr_start(qp);
	ibv_wr_rdma_write(qp, far_mr->rkey, (uintptr_t)bss[1] + 1000);
	list[0] = sge(bss[0], 100, near_mr);
	list[1] = sge(bss[0] + 200, 100, near_mr);
	ibv_wr_set_sge_list(qp, 2, list);
	ibv_wr_rdma_read(qp, far_mr->rkey, (uintptr_t)bss[1] + 1000);
	ibv_wr_set_sge(qp, near_mr->lkey, (uintptr_t)bss[0] + 4000, 200);
	ibv_wr_atomic_fetch_add(qp, far_mr->rkey, (uintptr_t)bss[1] + 4096, 2);
	ibv_wr_set_sge(qp, near_mr->lkey, (uintptr_t)bss[0] + 5000, 8);
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, near_mr->lkey, (uintptr_t)bss[0] + 600, 300);
	TRY(!ibv_wr_complete(qp));
	MUST(next_ex(&ends[0]));
	TRY(!memcmp(bss[0], bss[0] + 4000, 100) && !memcmp(bss[0] + 200, bss[0] + 4100, 100));
	TRY(bss[0][4200] == 0xee && !memcmp(bss[0] + 5000, &word, 8));
	ibv_end_poll(ends[0].cq_ex);
	MUST(done(&ends[1], &wc, IBV_WC_SUCCESS));
	TRY(!memcmp(bss[1], bss[0] + 600, 300) && bss[1][300] == 0xee);
	memcpy(&word, bss[1] + 4096, 8);
	TRY(word == 7);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* Several QPs, each with a thread, in regions beside each other in one page. */
enum { QUEUES = 4, LAPS = 300 };

struct lane {
	struct end near, far;
	struct ibv_mr *near_mr, *far_mr;
	pthread_t thread;
	int number;
	bool good;
};

static void *run_lane(void *arg)
{
	struct lane *lane = arg;
	uint8_t *near = bss[0] + 100 * lane->number, *far = bss[1] + 100 * lane->number;
	struct ibv_sge list;
	struct ibv_send_wr *bad, wr = { .sg_list = &list, .num_sge = 1,
					.send_flags = IBV_SEND_SIGNALED };
	struct ibv_wc wc;
	int i;

	wr.wr.rdma.remote_addr = (uintptr_t)far;
	wr.wr.rdma.rkey = lane->far_mr->rkey;
	list = sge(near, 100, lane->near_mr);
	for (i = 0; i < LAPS; i++) {
		memset(near, i, 100);
		wr.opcode = IBV_WR_RDMA_WRITE;
		if (ibv_post_send(lane->near.qp, &wr, &bad) || next(&lane->near, &wc))
			return NULL;
		memset(near, 0xee, 100);
		wr.opcode = IBV_WR_RDMA_READ;
		if (ibv_post_send(lane->near.qp, &wr, &bad) || next(&lane->near, &wc))
			return NULL;
		if (near[0] != (uint8_t)i || near[99] != (uint8_t)i || memcmp(near, far, 100))
			return NULL;
	}
	lane->good = true;
	return NULL;
}

static bool queues(void)
{
	static struct lane lanes[QUEUES];
	int i;

	for (i = 0; i < QUEUES; i++) {
		struct lane *lane = &lanes[i];

		lane->number = i;
		lane->near = ends[0];
		lane->far = ends[1];
		TRY((lane->near_mr = ibv_reg_mr(ends[0].pd, bss[0] + 100 * i, 100, ALL)));
		TRY((lane->far_mr = ibv_reg_mr(ends[1].pd, bss[1] + 100 * i, 100, ALL)));
		MUST(make_qp(&lane->near, IBV_QPT_RC, false, false));
		MUST(make_qp(&lane->far, IBV_QPT_RC, false, false));
		MUST(connect_qp(&lane->near, &lane->far) && connect_qp(&lane->far, &lane->near));
	}
	for (i = 0; i < QUEUES; i++)
		TRY(!pthread_create(&lanes[i].thread, NULL, run_lane, &lanes[i]));
	for (i = 0; i < QUEUES; i++)
		pthread_join(lanes[i].thread, NULL);
	for (i = 0; i < QUEUES; i++) {
		TRY(lanes[i].good);
		TRY(!ibv_destroy_qp(lanes[i].near.qp) && !ibv_destroy_qp(lanes[i].far.qp));
		TRY(!ibv_destroy_cq(lanes[i].near.cq) && !ibv_destroy_cq(lanes[i].far.cq));
		TRY(!ibv_dereg_mr(lanes[i].near_mr) && !ibv_dereg_mr(lanes[i].far_mr));
	}
	return true;
}

/* A region that is registered again over other memory. */
static bool moves(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	uint8_t *heap = malloc(ROOM), *to[] = { data[1], heap, bss[1] };
	size_t i;

	TRY(near_mr && far_mr && heap);
	for (i = 0; i < 3; i++) {
		fill(bss[0], ROOM, (unsigned int)i);
		memset(data[1], 0xee, ROOM);
		memset(bss[1], 0xee, ROOM);
		memset(heap, 0xee, ROOM);
		TRY(!ibv_rereg_mr(far_mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, to[i], ROOM, 0));
		MUST(make(IBV_QPT_RC, false, false));
		MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0] + AT, LEN, near_mr),
			  (struct remote){ to[i] + AT, far_mr, 0, 0 }, IBV_WC_SUCCESS));
		MUST(moved(bss[0], to[i]));
	}
	TRY(!ibv_rereg_mr(far_mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
			  IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0] + AT, LEN, near_mr),
		  (struct remote){ bss[1] + AT, far_mr, 0, 0 }, IBV_WC_SUCCESS));
	MUST(does(IBV_WR_RDMA_READ, sge(bss[0] + AT, LEN, near_mr),
		  (struct remote){ bss[1] + AT, far_mr, 0, 0 }, IBV_WC_REM_ACCESS_ERR));
	free(heap);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* Regions that go while a peer uses them, and contexts: each request ends, in whatever way. */
static bool leaves(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL), *far_mr;
	struct remote there = { bss[1], NULL, 1, 0 };
	struct end other = { 0 };
	struct ibv_wc wc;
	int i, lap;

	TRY(near_mr);
	for (lap = 0; lap < 40; lap++) {
		MUST(make(IBV_QPT_RC, false, false));
		TRY((far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL)));
		there.mr = far_mr;
		for (i = 0; i < 24; i++)
			MUST(post(i % 3 == 0 ? IBV_WR_RDMA_WRITE : i % 3 == 1 ? IBV_WR_RDMA_READ :
				  IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_SEND_SIGNALED,
				  sge(bss[0], i % 3 == 2 ? 8 : ROOM, near_mr), there));
		for (i = 0; i < lap % 12; i++)
			TRY(next(&ends[0], &wc) >= 0);
		TRY(!ibv_dereg_mr(far_mr));
		for (i = lap % 12; i < 24; i++)
			TRY(next(&ends[0], &wc) >= 0);
	}
	/* The context ends with all that was registered, while it is used. */
	for (lap = 0; lap < 8; lap++) {
		drop();
		MUST(open_end(&other, ibv_get_device_name(ends[1].ctx->device)));
		MUST(make_qp(&ends[0], IBV_QPT_RC, false, false) &&
		     make_qp(&other, IBV_QPT_RC, false, false));
		MUST(connect_qp(&ends[0], &other) && connect_qp(&other, &ends[0]));
		TRY((far_mr = ibv_reg_mr(other.pd, bss[1], ROOM, ALL)));
		there.mr = far_mr;
		for (i = 0; i < 24; i++)
			MUST(post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, sge(bss[0], ROOM, near_mr),
				  there));
		for (i = 0; i < lap; i++)
			TRY(next(&ends[0], &wc) == IBV_WC_SUCCESS);
		TRY(!ibv_close_device(other.ctx));
		ibv_destroy_qp(ends[0].qp);
		ends[0].qp = NULL;
	}
	TRY(!ibv_dereg_mr(near_mr));
	return true;
}

/* More registrations than a session has pieces of memory, of all sizes, again and again. */
static bool turnover(void)
{
	enum { MANY = 300 };
	static struct ibv_mr *all[MANY];
	size_t len = 96 << 20;
	uint8_t *memory = map(len, PROT_READ | PROT_WRITE);
	unsigned int i, lap;

	TRY(memory);
	for (lap = 0; lap < 3; lap++) {
		for (i = 0; i < MANY; i++) {
			size_t at = (i * 7919u) % (len / 2),
			       size = i % 20 ? 1 + i * 301 % 70000 : len / 2;

			TRY((all[i] = ibv_reg_mr(ends[0].pd, memory + at, size, ALL)));
		}
		for (i = 0; i < MANY; i++)
			TRY(!ibv_dereg_mr(all[i * 7 % MANY]));
	}
	munmap(memory, len);
	return operate(bss[0], bss[1]);
}

static int child(struct ibv_mr *mr)
{
	memset(bss[1], 0x33, ROOM);
	ibv_dereg_mr(mr);
	return ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL) ? 3 : 4;
}

/* A child has its own copy, no device, and no way to disturb its parent. */
static bool forks(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	int i, status;
	pid_t pid;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (i = 0; i < 5; i++) {
		fill(bss[0], ROOM, (unsigned int)i);
		memset(bss[1], 0xee, ROOM);
		pid = fork();
		if (!pid)
			_exit(child(far_mr));
		MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0] + AT, LEN, near_mr),
			  (struct remote){ bss[1] + AT, far_mr, 0, 0 }, IBV_WC_SUCCESS));
		TRY(waitpid(pid, &status, 0) == pid && WIFEXITED(status) &&
		    WEXITSTATUS(status) == 4);
		MUST(moved(bss[0], bss[1]));
		memset(bss[0], 0xee, ROOM);
		fill(bss[1], ROOM, 3);
		MUST(does(IBV_WR_RDMA_READ, sge(bss[0] + AT, LEN, near_mr),
			  (struct remote){ bss[1] + AT, far_mr, 0, 0 }, IBV_WC_SUCCESS));
		MUST(moved(bss[1], bss[0]));
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* ---- Memory that hangs ----------------------------------------------------------------------- */

/* Has whoever touches these pages wait, the kernel too: nobody brings them (userfaultfd(2)). */
static bool hang(uint8_t *memory, size_t len, int *uffd)
{
	struct uffdio_register all = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffdio_api api = { .api = UFFD_API };

	*uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (*uffd < 0 || ioctl(*uffd, UFFDIO_API, &api))
		return false;
	all.range.start = (uintptr_t)memory;
	all.range.len = len;
	return !ioctl(*uffd, UFFDIO_REGISTER, &all);
}

static uint8_t *map_hanging(size_t len, int *uffd)
{
	uint8_t *memory = map(len, PROT_READ | PROT_WRITE);

	return memory && hang(memory, len, uffd) ? memory : NULL;
}

/* The peer's wait ends, and so does the owner's when the pages come; both go on. */
static bool hangs(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL), *far_mr;
	double begin = now();
	uint8_t *far;
	int uffd;

	TRY(near_mr && (far = map_hanging(ROOM, &uffd)));
	TRY((far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL)));
	printf("hanging\n");
	fflush(stdout);
	MUST(make(IBV_QPT_RC, false, false));
	MUST(does(IBV_WR_RDMA_READ, sge(bss[0], 8, near_mr), (struct remote){ far, far_mr, 0, 0 },
		  IBV_WC_RETRY_EXC_ERR));
	TRY(now() - begin < 12);
	TRY(!close(uffd));
	MUST(make(IBV_QPT_RC, false, false));
	MUST(does(IBV_WR_RDMA_READ, sge(bss[0], 8, near_mr), (struct remote){ far, far_mr, 0, 0 },
		  IBV_WC_SUCCESS));
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return operate(bss[0], bss[1]);
}

/* ---- The measurement ------------------------------------------------------------------------- */

enum { BLOCK = 65536, BLOCKS = 16, WRITES = 20000 };

/* ---- The device goes ------------------------------------------------------------------------- */

static void *sleep_for_the_device(void *type)
{
	struct ibv_async_event event;

	if (!ibv_get_async_event(ends[0].ctx, &event)) {
		*(int *)type = event.event_type;
		ibv_ack_async_event(&event);
	}
	return NULL;
}

/* Whoever runs this ends the daemon when it has said that it sleeps. */
static bool asleep(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ends[0].ctx);
	struct ibv_cq *which, *cq = ibv_create_cq(ends[0].ctx, 4, NULL, channel, 0);
	struct ibv_qp_init_attr how = {
		.send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_RC,
	};
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	int bits = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	struct ibv_recv_wr *bad, receive = { .wr_id = 7 };
	struct ibv_qp *qp = cq ? ibv_create_qp(ends[0].pd, &how) : NULL;
	struct ibv_wc wc;
	pthread_t other;
	void *context;
	int type = -1;

	TRY(channel && qp);
	TRY(!ibv_modify_qp(qp, &init, bits) && !ibv_post_recv(qp, &receive, &bad));
	TRY(!ibv_req_notify_cq(cq, 0) && !pthread_create(&other, NULL, sleep_for_the_device,
							 &type));
	printf("asleep\n");
	fflush(stdout);
	TRY(!ibv_get_cq_event(channel, &which, &context) && which == cq);
	ibv_ack_cq_events(cq, 1);
	TRY(ibv_poll_cq(cq, 1, &wc) == 1 && wc.wr_id == 7 && wc.status == IBV_WC_WR_FLUSH_ERR);
	TRY(ibv_req_notify_cq(cq, 0) == 0 && ibv_poll_cq(cq, 1, &wc) == 0);
	/* Nothing will ever come: nobody may sleep for it. */
	TRY(ibv_get_cq_event(channel, &which, &context));
	TRY(!pthread_join(other, NULL) && type == IBV_EVENT_DEVICE_FATAL);
	TRY(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
	return true;
}

static bool measure(const char *name, uint8_t *near, uint8_t *far)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, near, BLOCK * BLOCKS, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, BLOCK * BLOCKS, ALL);
	double begin, end;
	struct ibv_wc wc;
	int i;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	fill(near, BLOCK * BLOCKS, 1);
	memset(far, 0, BLOCK * BLOCKS);
	begin = now();
	for (i = 0; i < WRITES; i++) {
		size_t at = (size_t)(i % BLOCKS) * BLOCK;

		MUST(post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, sge(near + at, BLOCK, near_mr),
			  (struct remote){ far + at, far_mr, 0, 0 }));
		if (i >= DEPTH / 2)
			MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
	}
	for (i = 0; i < DEPTH / 2; i++)
		MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
	end = now();
	TRY(!memcmp(near, far, BLOCK * BLOCKS));
	printf("%s %.0f\n", name, (double)WRITES * BLOCK / (end - begin));
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

static bool bandwidth(void)
{
	static uint8_t from[BLOCK * BLOCKS], to[BLOCK * BLOCKS];
	int fd = memfd_create("memory", MFD_CLOEXEC), i;
	uint8_t *heap = malloc(2 * BLOCK * BLOCKS), *file;
	double begin;

	TRY(heap && fd >= 0 && !ftruncate(fd, 2 * BLOCK * BLOCKS));
	file = mmap(NULL, 2 * BLOCK * BLOCKS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	TRY(file != MAP_FAILED);
	fill(from, sizeof(from), 2);
	memset(to, 1, sizeof(to));
	begin = now();
	for (i = 0; i < WRITES; i++) {
		memcpy(to + (size_t)(i % BLOCKS) * BLOCK, from + (size_t)(i % BLOCKS) * BLOCK,
		       BLOCK);
		__asm__ volatile("" ::: "memory");
	}
	printf("memcpy %.0f\n", (double)WRITES * BLOCK / (now() - begin));
	MUST(measure("malloc", heap, heap + BLOCK * BLOCKS));
	MUST(measure("file", file, file + BLOCK * BLOCKS));
	MUST(measure("private", from, to));
	munmap(file, 2 * BLOCK * BLOCKS);
	close(fd);
	free(heap);
	return true;
}

/* ---- Threads --------------------------------------------------------------------------------- */

enum { THREADS = 4, REGIONS = 40, LIVES = 40 };

struct registrar {
	uint8_t *memory;
	struct ibv_mr *mrs[REGIONS];
};

static pthread_barrier_t together;

static void *register_all(void *arg)
{
	struct registrar *own = arg;
	int i;

	pthread_barrier_wait(&together);
	for (i = 0; i < REGIONS; i++)
		own->mrs[i] = ibv_reg_mr(ends[1].pd, own->memory + i * 64, 64, ALL);
	return NULL;
}

/* Every region of a context, whose threads made them at the same time, is where its key says. */
static bool all_are_there(struct registrar *of)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	pthread_t threads[THREADS];
	int i, n;

	TRY(near_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (n = 0; n < THREADS; n++)
		TRY(!pthread_create(&threads[n], NULL, register_all, &of[n]));
	for (n = 0; n < THREADS; n++)
		pthread_join(threads[n], NULL);
	for (n = 0; n < THREADS; n++) {
		for (i = 0; i < REGIONS; i++) {
			struct remote there = { of[n].memory + i * 64 + 7, of[n].mrs[i], 0, 0 };
			struct ibv_sge from = sge(bss[0], 1, near_mr);

			TRY(of[n].mrs[i]);
			bss[0][0] = (uint8_t)(n * REGIONS + i);
			MUST(does(IBV_WR_RDMA_WRITE, from, there, IBV_WC_SUCCESS));
			TRY(of[n].memory[i * 64 + 7] == bss[0][0]);
		}
	}
	for (n = 0; n < THREADS; n++) {
		for (i = 0; i < REGIONS; i++)
			TRY(!ibv_dereg_mr(of[n].mrs[i]));
	}
	TRY(!ibv_dereg_mr(near_mr));
	return true;
}

/* Each context has tables of its own, which grow as its threads register. */
static bool registrars(void)
{
	const char *name = ibv_get_device_name(ends[1].ctx->device);
	struct end kept = ends[1];
	struct registrar of[THREADS];
	bool ok = true;
	int i, n;

	TRY(!pthread_barrier_init(&together, NULL, THREADS));
	for (n = 0; n < THREADS; n++)
		TRY((of[n].memory = map(REGIONS * 64, PROT_READ | PROT_WRITE)));
	for (i = 0; ok && i < LIVES; i++) {
		memset(&ends[1], 0, sizeof(ends[1]));
		ok = open_end(&ends[1], name) && all_are_there(of);
		drop();
		if (ok && (ibv_dealloc_pd(ends[1].pd) || ibv_close_device(ends[1].ctx)))
			ok = fail("something is left");
	}
	ends[1] = kept;
	for (n = 0; n < THREADS; n++)
		munmap(of[n].memory, REGIONS * 64);
	pthread_barrier_destroy(&together);
	return ok;
}
