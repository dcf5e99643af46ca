// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A part of process-calls.c: ends of objects, and their events.
 */
struct queues {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
};

static struct queues begin(void)
{
	struct queues q = { .context = open_device() };

	MUST((q.pd = ibv_alloc_pd(q.context)));
	MUST((q.channel = ibv_create_comp_channel(q.context)));
	return q;
}

static struct ibv_qp *make_qp(const struct queues *q, struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 64, .max_send_sge = 1,
			 .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *qp = ibv_create_qp(q->pd, &init);

	MUST(qp);
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    IBV_QP_ACCESS_FLAGS));
	return qp;
}

static void to_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static void post(struct ibv_qp *qp, int count)
{
	struct ibv_recv_wr wr = {}, *bad;

	while (count--)
		MUST(!ibv_post_recv(qp, &wr, &bad));
}

static void complete(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	for (int tries = 0; ibv_poll_cq(cq, 1, &wc) != 1; tries++) {
		if (tries == WAIT_MS)
			fail("nothing completes");
		usleep(1000);
	}
}

/* An event of a CQ: a receive that is flushed. */
static struct ibv_qp *raise_event(const struct queues *q, struct ibv_cq *cq)
{
	struct ibv_qp *qp;

	MUST(!ibv_req_notify_cq(cq, 0));
	qp = make_qp(q, cq, NULL);
	post(qp, 1);
	to_error(qp);
	complete(cq);
	return qp;
}

static void send_to_itself(struct ibv_context *context, struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = qp->qp_num,
		.ah_attr = { .is_global = 1, .port_num = 1 },
	};
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;

	MUST(!ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid));
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			    IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = attr.rnr_retry = 7;
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
			    IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
	MUST(!ibv_post_send(qp, &wr, &bad));
}

static bool readable(int fd, int ms)
{
	struct pollfd end = { .fd = fd, .events = POLLIN };

	return poll(&end, 1, ms) == 1;
}

static struct ibv_cq *get_event(const struct queues *q)
{
	struct ibv_cq *cq;
	void *of;

	if (!readable(q->channel->fd, WAIT_MS))
		fail("no event of completion");
	MUST(!ibv_get_cq_event(q->channel, &cq, &of));
	return cq;
}

static void get_async(const struct queues *q, struct ibv_async_event *event)
{
	if (!readable(q->context->async_fd, WAIT_MS))
		fail("no asynchronous event");
	MUST(!ibv_get_async_event(q->context, event));
}

/* An end that another thread goes to. */
struct ending {
	int (*end)(void *object);
	void *object;
	pthread_t thread;
	atomic_bool done;
	int ret;
};

static void *go(void *of)
{
	struct ending *ending = of;

	ending->ret = ending->end(ending->object);
	ending->done = true;
	return NULL;
}

static int end_cq(void *cq)
{
	return ibv_destroy_cq(cq);
}

static int end_qp(void *qp)
{
	return ibv_destroy_qp(qp);
}

static int end_srq(void *srq)
{
	return ibv_destroy_srq(srq);
}

static void begin_end(struct ending *ending, int (*end)(void *), void *object)
{
	memset(ending, 0, sizeof(*ending));
	ending->end = end;
	ending->object = object;
	MUST(!pthread_create(&ending->thread, NULL, go, ending));
	usleep(A_WHILE_MS * 1000);
	if (ending->done)
		fail("it is destroyed though an event of it is not acknowledged");
}

static void ends_now(struct ending *ending)
{
	for (int tries = 0; !ending->done; tries++) {
		if (tries == WAIT_MS / 10)
			fail("it is not destroyed though its events are acknowledged");
		usleep(10000);
	}
	pthread_join(ending->thread, NULL);
	if (ending->ret)
		fail("it is not destroyed: %d", ending->ret);
}

static void acks_cq(void)
{
	struct queues q = begin();
	struct ending ending;
	struct ibv_cq *cq;
	struct ibv_qp *qp;

	for (int events = 1; events <= 3; events++) {
		MUST((cq = ibv_create_cq(q.context, 16, NULL, q.channel, 0)));
		for (int i = 0; i < events; i++) {
			qp = raise_event(&q, cq);
			MUST(get_event(&q) == cq);
			MUST(!ibv_destroy_qp(qp));
		}
		begin_end(&ending, end_cq, cq);
		ibv_ack_cq_events(cq, events - 1);
		usleep(A_WHILE_MS * 500);
		MUST(!ending.done);
		ibv_ack_cq_events(cq, 1);
		ends_now(&ending);
	}
	/* What nobody has read is not waited for. */
	MUST((cq = ibv_create_cq(q.context, 16, NULL, q.channel, 0)));
	qp = raise_event(&q, cq);
	MUST(readable(q.channel->fd, WAIT_MS));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
	MUST(!readable(q.channel->fd, A_WHILE_MS));
}

static void acks_async(void)
{
	struct queues q = begin();
	struct ibv_srq_init_attr sattr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	struct ibv_async_event of_cq = {}, of_qp = {}, event;
	struct ibv_recv_wr wr = {}, *bad;
	struct ending ending;
	struct ibv_srq *srq;
	struct ibv_cq *cq;
	struct ibv_qp *qp;

	/* A CQ that has no room fails, and so does its QP. */
	MUST((cq = ibv_create_cq(q.context, 1, NULL, NULL, 0)));
	qp = make_qp(&q, cq, NULL);
	post(qp, 32);
	to_error(qp);
	while (of_cq.event_type != IBV_EVENT_CQ_ERR || of_qp.event_type != IBV_EVENT_QP_FATAL) {
		get_async(&q, &event);
		if (event.event_type == IBV_EVENT_CQ_ERR)
			of_cq = event;
		else if (event.event_type == IBV_EVENT_QP_FATAL)
			of_qp = event;
		else
			fail("%s", ibv_event_type_str(event.event_type));
	}
	MUST(of_cq.element.cq == cq && of_qp.element.qp == qp);
	begin_end(&ending, end_qp, qp);
	ibv_ack_async_event(&of_qp);
	ends_now(&ending);
	begin_end(&ending, end_cq, cq);
	ibv_ack_async_event(&of_cq);
	ends_now(&ending);

	/* A queue pair sends to itself what takes a receive, and there are too few. */
	MUST((cq = ibv_create_cq(q.context, 16, NULL, NULL, 0)));
	MUST((srq = ibv_create_srq(q.pd, &sattr)));
	for (int i = 0; i < 2; i++)
		MUST(!ibv_post_srq_recv(srq, &wr, &bad));
	MUST(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	qp = make_qp(&q, cq, srq);
	send_to_itself(q.context, qp);
	complete(cq);
	complete(cq);
	get_async(&q, &event);
	MUST(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	MUST(!ibv_destroy_qp(qp));
	begin_end(&ending, end_srq, srq);
	ibv_ack_async_event(&event);
	ends_now(&ending);
}

static atomic_bool enough;

static void *ask_on(void *context)
{
	struct ibv_device_attr attr;

	while (!enough)
		MUST(!ibv_query_device(context, &attr));
	return NULL;
}

/*
 * More events than a channel has room for; with each CQ that goes, its own go, and no other's. The
 * device looks for room with each command, of which another thread gives many.
 */
static void others(void)
{
	enum { MANY = 500 };
	struct queues q = begin();
	static struct ibv_cq *cqs[MANY];
	static bool told[MANY];
	pthread_t thread;
	int left = 0, i;

	for (i = 0; i < MANY; i++) {
		struct ibv_qp *qp;

		MUST((cqs[i] = ibv_create_cq(q.context, 4, &told[i], q.channel, 0)));
		qp = raise_event(&q, cqs[i]);
		MUST(!ibv_destroy_qp(qp));
	}
	MUST(!pthread_create(&thread, NULL, ask_on, q.context));
	for (i = 0; i < MANY; i++) {
		if (i % 8 == 3) {
			left++;
			continue;
		}
		MUST(!ibv_destroy_cq(cqs[i]));
	}
	for (; left; left--) {
		bool *seen;
		struct ibv_cq *cq;

		if (!readable(q.channel->fd, WAIT_MS))
			fail("events of %d CQs are lost", left);
		MUST(!ibv_get_cq_event(q.channel, &cq, (void **)&seen));
		if (*seen || cqs[seen - told] != cq || (seen - told) % 8 != 3)
			fail("an event of nobody");
		*seen = true;
		ibv_ack_cq_events(cq, 1);
		MUST(!ibv_destroy_cq(cq));
	}
	MUST(!readable(q.channel->fd, A_WHILE_MS));
	enough = true;
	pthread_join(thread, NULL);
}
