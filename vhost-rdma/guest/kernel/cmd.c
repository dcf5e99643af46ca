// SPDX-License-Identifier: GPL-2.0
/*
 * The control queue: one request, one response, a bounded wait.
 *
 * Requests and responses are copied through a buffer of the command's own, so that a command that
 * the device never answers can be abandoned: its buffer stays with the virtqueue and is freed when
 * the device answers after all, or after the reset. The device executes commands in order
 * (docs/virtio-rdma.md, section 5.1); a caller behind others therefore gives up only when 5 s
 * passed without any answer.
 *
 * Nobody waits with a lock held. Who may not sleep starts a command and is called back
 * (vrdma_cmd_start, for address handles, ah.c); a delayed work looks after those. What does not fit
 * into the ring stands in a backlog in the order in which it was started.
 */
#include <linux/slab.h>
#include "virtio_rdma.h"

struct vrdma_cmd_buf {
	struct list_head node;
	struct completion done;
	/* Of a command that nobody waits for; called once, NULL from then on. */
	vrdma_cmd_done *call;
	void *arg;
	bool finished;
	bool abandoned;
	bool asks;			/* of a device that is lost */
	u32 used;
	size_t req_len;
	size_t resp_len;
	u8 *resp;
	u8 data[] __aligned(8);
};

static int vrdma_status_to_errno(struct vrdma *vr, u32 status)
{
	switch (status) {
	case VIRTIO_RDMA_OK:
		return 0;
	case VIRTIO_RDMA_ERR_INVAL:
	case VIRTIO_RDMA_ERR_NOENT:
		return -EINVAL;
	case VIRTIO_RDMA_ERR_NOMEM:
		return -ENOMEM;
	case VIRTIO_RDMA_ERR_NOTSUPP:
		return -EOPNOTSUPP;
	case VIRTIO_RDMA_ERR_BUSY:
		return -EBUSY;
	case VIRTIO_RDMA_ERR_PERM:
		return -EPERM;
	case VIRTIO_RDMA_ERR_FAULT:
		return -EFAULT;
	case VIRTIO_RDMA_ERR_EXIST:
		return -EEXIST;
	case VIRTIO_RDMA_ERR_UNREACH:
		return -EHOSTUNREACH;
	case VIRTIO_RDMA_ERR_STATE:
	case VIRTIO_RDMA_ERR_FATAL:
		vrdma_failed(vr, "the device reports that it failed");
		return -EIO;
	default:
		dev_err(&vr->vdev->dev, "unknown command status %u\n", status);
		return -EIO;
	}
}

/*
 * The shortest response that a device may give is that of the first version; what is missing beyond
 * is zero (section 5.9), as the buffer is.
 */
static size_t vrdma_resp_base(const struct vrdma_cmd_buf *buf, size_t resp_len)
{
	const struct virtio_rdma_cmd_hdr *hdr = (const void *)buf->data;

	if (le16_to_cpu(hdr->opcode) == VIRTIO_RDMA_CMD_INIT)
		return offsetof(struct virtio_rdma_init_resp, caps);
	return resp_len;
}

/* What an answered command says; its body goes to `resp`. */
static int vrdma_cmd_result(struct vrdma *vr, const struct vrdma_cmd_buf *buf, void *resp,
			    size_t resp_len)
{
	const struct virtio_rdma_resp_hdr *hdr = (const void *)buf->resp;
	int ret;

	if (buf->used < sizeof(*hdr)) {
		vrdma_failed(vr, "a response without a header");
		return -EIO;
	}
	ret = vrdma_status_to_errno(vr, le32_to_cpu(hdr->status));
	if (ret)
		return ret;
	if (buf->used < sizeof(*hdr) + vrdma_resp_base(buf, resp_len)) {
		vrdma_failed(vr, "a response that is too short");
		return -EIO;
	}
	if (resp_len)
		memcpy(resp, buf->resp + sizeof(*hdr), resp_len);
	return 0;
}

/* ---- The ring, under the lock ---- */

static int vrdma_cmdq_add(struct vrdma_cmdq *q, struct vrdma_cmd_buf *buf)
{
	struct scatterlist out, in, *sgs[2] = { &out, &in };
	int ret;

	lockdep_assert_held(&q->lock);
	sg_init_one(&out, buf->data, buf->req_len);
	sg_init_one(&in, buf->resp, buf->resp_len);
	ret = virtqueue_add_sgs(q->vq, sgs, 1, 1, buf, GFP_ATOMIC);
	if (!ret)
		list_add_tail(&buf->node, &q->pending);
	return ret;
}

/* True if something was added: the caller kicks. */
static bool vrdma_cmdq_refill(struct vrdma_cmdq *q)
{
	struct vrdma_cmd_buf *buf, *next;
	bool added = false;

	lockdep_assert_held(&q->lock);
	list_for_each_entry_safe(buf, next, &q->backlog, node) {
		list_del_init(&buf->node);
		if (vrdma_cmdq_add(q, buf)) {
			list_add(&buf->node, &q->backlog);
			break;
		}
		added = true;
	}
	return added;
}

/* Takes what was answered; commands with a callback go to `called`. */
static void vrdma_cmdq_reap(struct vrdma_cmdq *q, struct list_head *called)
{
	struct vrdma_cmd_buf *buf;
	u32 len;

	lockdep_assert_held(&q->lock);
	while ((buf = virtqueue_get_buf(q->vq, &len))) {
		q->answered++;
		if (buf->abandoned) {
			/* Nobody waits, but it tells that somebody is there. */
			vrdma_heard(container_of(q, struct vrdma, cmdq));
			kfree(buf);
			continue;
		}
		list_del_init(&buf->node);
		buf->used = len;
		buf->finished = true;
		if (buf->call)
			list_add_tail(&buf->node, called);
		else
			complete(&buf->done);
	}
	if (vrdma_cmdq_refill(q))
		virtqueue_kick(q->vq);
}

/* ---- Callbacks, without the lock ---- */

static void vrdma_cmdq_call(struct vrdma *vr, struct list_head *called)
{
	struct vrdma_cmd_buf *buf, *next;
	struct virtio_rdma_object_resp body;
	size_t len;
	int ret;

	list_for_each_entry_safe(buf, next, called, node) {
		list_del_init(&buf->node);
		memset(&body, 0, sizeof(body));
		len = buf->resp_len - sizeof(struct virtio_rdma_resp_hdr);
		ret = -EIO;
		if (buf->finished)
			ret = vrdma_cmd_result(vr, buf, &body, len);
		buf->call(vr, buf->arg, ret, le32_to_cpu(body.object));
		kfree(buf);
	}
}

void vrdma_cmdq_callback(struct virtqueue *vq)
{
	struct vrdma *vr = vq->vdev->priv;
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;
	LIST_HEAD(called);

	spin_lock_irqsave(&q->lock, flags);
	do {
		virtqueue_disable_cb(vq);
		vrdma_cmdq_reap(q, &called);
	} while (!virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&q->lock, flags);
	vrdma_cmdq_call(vr, &called);
}

/*
 * Wakes every sleeper; they find their command unfinished and the device lost. Commands with a
 * callback fail now: one that the device has in hand leaves its buffer there and is called by a
 * copy of the two words that it takes.
 */
void vrdma_cmdq_fail_all(struct vrdma *vr)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	struct vrdma_cmd_buf *buf;
	unsigned long flags;
	vrdma_cmd_done *call;
	LIST_HEAD(called);
	bool more;
	void *arg;

	spin_lock_irqsave(&q->lock, flags);
	list_splice_init(&q->backlog, &called);
	list_for_each_entry(buf, &q->pending, node)
		complete(&buf->done);
	spin_unlock_irqrestore(&q->lock, flags);
	vrdma_cmdq_call(vr, &called);
	do {
		more = false;
		spin_lock_irqsave(&q->lock, flags);
		list_for_each_entry(buf, &q->pending, node) {
			if (!buf->call)
				continue;
			call = buf->call;
			arg = buf->arg;
			list_del_init(&buf->node);
			buf->abandoned = true;
			more = true;
			break;
		}
		spin_unlock_irqrestore(&q->lock, flags);
		if (more)
			call(vr, arg, -EIO, 0);
	} while (more);
}

/* ---- Commands that nobody waits for ---- */

struct vrdma_cmd_buf *vrdma_cmd_alloc(u16 opcode, u32 ctx, const void *req, size_t req_len,
				      size_t resp_len, gfp_t gfp)
{
	size_t out = sizeof(struct virtio_rdma_cmd_hdr) + req_len;
	size_t in = sizeof(struct virtio_rdma_resp_hdr) + resp_len;
	struct virtio_rdma_cmd_hdr *hdr;
	struct vrdma_cmd_buf *buf;

	buf = kzalloc(sizeof(*buf) + ALIGN(out, 8) + in, gfp);
	if (!buf)
		return NULL;
	init_completion(&buf->done);
	INIT_LIST_HEAD(&buf->node);
	buf->req_len = out;
	buf->resp_len = in;
	buf->resp = buf->data + ALIGN(out, 8);
	hdr = (void *)buf->data;
	hdr->opcode = cpu_to_le16(opcode);
	hdr->ctx = cpu_to_le32(ctx);
	if (req_len)
		memcpy(hdr + 1, req, req_len);
	return buf;
}

/* The request of a command that was not started yet. */
void *vrdma_cmd_request(struct vrdma_cmd_buf *buf)
{
	return buf->data + sizeof(struct virtio_rdma_cmd_hdr);
}

void vrdma_cmd_free(struct vrdma_cmd_buf *buf)
{
	kfree(buf);
}

/*
 * Takes `buf`. `call` is called once, by the interrupt or by us: with the answer, or with -EIO when
 * the device is lost. It may be called before this returns.
 */
void vrdma_cmd_start(struct vrdma *vr, struct vrdma_cmd_buf *buf, vrdma_cmd_done *call, void *arg)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;
	bool lost;

	buf->call = call;
	buf->arg = arg;
	spin_lock_irqsave(&q->lock, flags);
	lost = vrdma_is_lost(vr);
	if (!lost) {
		list_add_tail(&buf->node, &q->backlog);
		if (vrdma_cmdq_refill(q))
			virtqueue_kick(q->vq);
	}
	spin_unlock_irqrestore(&q->lock, flags);
	if (lost) {
		call(vr, arg, -EIO, 0);
		kfree(buf);
		return;
	}
	/* Left as it is if somebody looks already. */
	queue_delayed_work(system_long_wq, &q->watch, msecs_to_jiffies(VRDMA_CMD_TIMEOUT_MS));
}

static bool vrdma_cmdq_anything_started(struct vrdma_cmdq *q)
{
	struct vrdma_cmd_buf *buf;

	lockdep_assert_held(&q->lock);
	if (!list_empty(&q->backlog))
		return true;
	list_for_each_entry(buf, &q->pending, node)
		if (buf->call)
			return true;
	return false;
}

/* Runs while commands with a callback are out: the answers that came since the last look count. */
static void vrdma_cmdq_watch(struct work_struct *work)
{
	struct vrdma_cmdq *q = container_of(to_delayed_work(work), struct vrdma_cmdq, watch);
	struct vrdma *vr = container_of(q, struct vrdma, cmdq);
	bool waiting, silent;
	unsigned long flags;
	LIST_HEAD(called);

	spin_lock_irqsave(&q->lock, flags);
	vrdma_cmdq_reap(q, &called);
	waiting = vrdma_cmdq_anything_started(q);
	silent = waiting && q->answered == q->watched;
	q->watched = q->answered;
	spin_unlock_irqrestore(&q->lock, flags);
	vrdma_cmdq_call(vr, &called);
	if (vrdma_is_lost(vr) || !waiting)
		return;
	if (silent) {
		WRITE_ONCE(vr->silent, true);
		vrdma_lost(vr, "a command was not answered in time");
		return;
	}
	queue_delayed_work(system_long_wq, &q->watch, msecs_to_jiffies(VRDMA_CMD_TIMEOUT_MS));
}

/* ---- Commands with a waiting caller ---- */

static int vrdma_cmdq_submit(struct vrdma *vr, struct vrdma_cmd_buf *buf)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;
	int ret = -EIO;

	spin_lock_irqsave(&q->lock, flags);
	if (!vrdma_is_lost(vr) || buf->asks) {
		ret = vrdma_cmdq_add(q, buf);
		if (!ret)
			virtqueue_kick(q->vq);
	}
	spin_unlock_irqrestore(&q->lock, flags);
	return ret;
}

static bool vrdma_cmdq_poll(struct vrdma *vr, struct vrdma_cmd_buf *buf, u64 *answered)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;
	LIST_HEAD(called);
	bool finished;

	spin_lock_irqsave(&q->lock, flags);
	vrdma_cmdq_reap(q, &called);
	finished = buf->finished;
	*answered = q->answered;
	spin_unlock_irqrestore(&q->lock, flags);
	vrdma_cmdq_call(vr, &called);
	return finished;
}

/* True when the device answered. Otherwise the wait is over, or the device is lost. */
static bool vrdma_cmdq_wait(struct vrdma *vr, struct vrdma_cmd_buf *buf)
{
	unsigned int idle_ms = 0;
	u64 seen = 0, answered;

	for (;;) {
		/* Polling here also covers an interrupt that got lost. */
		if (vrdma_cmdq_poll(vr, buf, &answered))
			return true;
		if (vrdma_is_lost(vr) && !buf->asks)
			return false;
		if (answered != seen) {
			seen = answered;
			idle_ms = 0;
		}
		if (idle_ms >= VRDMA_CMD_TIMEOUT_MS)
			return false;
		wait_for_completion_timeout(&buf->done, msecs_to_jiffies(500));
		idle_ms += 500;
	}
}

/* Takes `buf` unless it returns 0. */
static int vrdma_cmd_run(struct vrdma *vr, struct vrdma_cmd_buf *buf)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;
	bool finished;
	int ret;

	/*
	 * The ring is full only if commands that nobody waits for fill it; they are answered
	 * soon.
	 */
	for (;;) {
		ret = vrdma_cmdq_submit(vr, buf);
		if (ret != -ENOSPC || buf->asks)
			break;
		schedule_timeout_uninterruptible(1);
	}
	if (ret) {
		kfree(buf);
		return ret;
	}
	finished = vrdma_cmdq_wait(vr, buf);
	if (!finished) {
		spin_lock_irqsave(&q->lock, flags);
		finished = buf->finished;
		if (!finished) {
			list_del_init(&buf->node);
			buf->abandoned = true;
		}
		spin_unlock_irqrestore(&q->lock, flags);
	}
	return finished ? 0 : -ETIMEDOUT;
}

static int vrdma_cmd_wait(struct vrdma *vr, struct vrdma_cmd_buf *buf, void *resp, size_t resp_len)
{
	const struct virtio_rdma_cmd_hdr *hdr = (const void *)buf->data;
	u16 opcode = le16_to_cpu(hdr->opcode);
	int ret;

	might_sleep();
	down(&vr->cmdq.slots);
	ret = vrdma_cmd_run(vr, buf);
	up(&vr->cmdq.slots);
	if (ret == -ETIMEDOUT) {
		if (!vrdma_is_lost(vr))
			dev_err(&vr->vdev->dev, "command 0x%x: no answer\n", opcode);
		WRITE_ONCE(vr->silent, true);
		vrdma_lost(vr, "a command was not answered in time");
		return -EIO;
	}
	if (ret)
		return ret;
	ret = vrdma_cmd_result(vr, buf, resp, resp_len);
	if (ret)
		dev_dbg(&vr->vdev->dev, "command 0x%x: %d\n", opcode, ret);
	kfree(buf);
	return ret;
}

int vrdma_cmd(struct vrdma *vr, u16 opcode, u32 ctx, const void *req, size_t req_len, void *resp,
	      size_t resp_len)
{
	struct vrdma_cmd_buf *buf;

	if (vrdma_is_lost(vr))
		return -EIO;
	buf = vrdma_cmd_alloc(opcode, ctx, req, req_len, resp_len, GFP_KERNEL);
	return buf ? vrdma_cmd_wait(vr, buf, resp, resp_len) : -ENOMEM;
}

/*
 * Whether anybody is behind a device that is lost: whoever answers SHUTDOWN, whatever he answers.
 * The request stays in the ring if there is nobody, and its answer, if one comes, is heard.
 */
bool vrdma_cmd_ask(struct vrdma *vr)
{
	struct vrdma_cmd_buf *buf;
	int ret;

	might_sleep();
	buf = vrdma_cmd_alloc(VIRTIO_RDMA_CMD_SHUTDOWN, 0, NULL, 0, 0, GFP_KERNEL | __GFP_NOFAIL);
	buf->asks = true;
	ret = vrdma_cmd_run(vr, buf);
	if (!ret)
		kfree(buf);
	return !ret;
}

/* True if the device is done with the object's memory; otherwise that waits for the reset. */
static bool vrdma_cmd_end(struct vrdma *vr, u16 opcode, u32 ctx, const void *req, size_t req_len,
			  bool may_be_busy, int *error)
{
	struct vrdma_cmd_buf *buf;
	int ret;

	*error = 0;
	if (vrdma_is_lost(vr))
		return false;
	buf = vrdma_cmd_alloc(opcode, ctx, req, req_len, 0, GFP_KERNEL | __GFP_NOFAIL);
	ret = vrdma_cmd_wait(vr, buf, NULL, 0);
	if (ret == -EBUSY && may_be_busy)
		*error = ret;
	else if (ret && !vrdma_is_lost(vr))
		dev_err(&vr->vdev->dev, "command 0x%x: refused (%d)\n", opcode, ret);
	return !ret;
}

/*
 * Destruction can not fail: it needs no memory that may be refused, and a device that is lost ends
 * the object for us. One that refuses, which the verbs core gave it no reason to, keeps the object,
 * and with it the number. Only memory may stay behind, and the result says whether it does (false).
 */
bool vrdma_cmd_destroy(struct vrdma *vr, u16 opcode, u32 ctx, u32 object)
{
	struct virtio_rdma_object_req req = { .object = cpu_to_le32(object) };
	int error;

	return vrdma_cmd_end(vr, opcode, ctx, &req, sizeof(req), false, &error);
}

bool vrdma_cmd_destroy_context(struct vrdma *vr, u32 ctx)
{
	int error;

	return vrdma_cmd_end(vr, VIRTIO_RDMA_CMD_CONTEXT_DESTROY, ctx, NULL, 0, false, &error);
}

/* A region may have windows, of which the verbs core does not know: -EBUSY, and it stays. */
int vrdma_cmd_dereg(struct vrdma *vr, u32 ctx, u32 lkey, bool *device_is_done)
{
	struct virtio_rdma_object_req req = { .object = cpu_to_le32(lkey) };
	int error;

	*device_is_done = vrdma_cmd_end(vr, VIRTIO_RDMA_CMD_MR_DEREG, ctx, &req, sizeof(req), true,
					&error);
	return error;
}

/* ---- Life ---- */

void vrdma_cmdq_init(struct vrdma *vr, struct virtqueue *vq)
{
	struct vrdma_cmdq *q = &vr->cmdq;

	q->vq = vq;
	spin_lock_init(&q->lock);
	INIT_LIST_HEAD(&q->pending);
	INIT_LIST_HEAD(&q->backlog);
	INIT_DELAYED_WORK(&q->watch, vrdma_cmdq_watch);
	/* Two descriptors each; half of the ring is left to commands that nobody waits for. */
	sema_init(&q->slots, max_t(u32, virtqueue_get_vring_size(vq) / 4, 1));
}

/* After the reset of the device: what it never answered. */
void vrdma_cmdq_drop(struct vrdma *vr)
{
	struct vrdma_cmd_buf *buf;

	if (!vr->cmdq.vq)
		return;
	cancel_delayed_work_sync(&vr->cmdq.watch);
	while ((buf = virtqueue_detach_unused_buf(vr->cmdq.vq))) {
		if (buf->call && !buf->abandoned)
			buf->call(vr, buf->arg, -EIO, 0);
		kfree(buf);
	}
	vr->cmdq.vq = NULL;
}
