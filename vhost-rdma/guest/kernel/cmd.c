// SPDX-License-Identifier: GPL-2.0
/*
 * The control queue: one request, one response, a bounded wait.
 *
 * Requests and responses are copied through a buffer of the command's own, so that a command that the device never answers can be abandoned: its
 * buffer stays with the virtqueue and is freed when the device answers after all, or after the reset. The device executes commands in order
 * (docs/virtio-rdma.md, section 5.1); a caller behind others therefore gives up only when 5 s passed without any answer.
 *
 * Callers that may not sleep (address handles of the connection manager are made under its spinlock) poll the queue. They never touch
 * the verbs core; the loss of the device is handled by a work item.
 */
#include <linux/delay.h>
#include <linux/slab.h>
#include "virtio_rdma.h"

struct vrdma_cmd_buf {
	struct list_head node;
	struct completion done;
	bool finished;
	bool abandoned;
	u32 used;
	size_t req_len;
	size_t resp_len;
	u8 *resp;
	u8 data[] __aligned(8);
};

void vrdma_cmdq_init(struct vrdma *vr, struct virtqueue *vq)
{
	struct vrdma_cmdq *q = &vr->cmdq;

	q->vq = vq;
	spin_lock_init(&q->lock);
	INIT_LIST_HEAD(&q->pending);
	/* Two descriptors each; half of the ring is left to callers that can not wait for a slot. */
	sema_init(&q->slots, max_t(u32, virtqueue_get_vring_size(vq) / 4, 1));
}

static void vrdma_cmdq_reap(struct vrdma_cmdq *q)
{
	struct vrdma_cmd_buf *buf;
	u32 len;

	lockdep_assert_held(&q->lock);
	while ((buf = virtqueue_get_buf(q->vq, &len))) {
		q->answered++;
		if (buf->abandoned) {
			kfree(buf);
			continue;
		}
		list_del_init(&buf->node);
		buf->used = len;
		buf->finished = true;
		complete(&buf->done);
	}
}

void vrdma_cmdq_callback(struct virtqueue *vq)
{
	struct vrdma *vr = vq->vdev->priv;
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	do {
		virtqueue_disable_cb(vq);
		vrdma_cmdq_reap(q);
	} while (!virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&q->lock, flags);
}

/* Wakes every sleeper; they find their command unfinished and the device lost. */
void vrdma_cmdq_fail_all(struct vrdma *vr)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	struct vrdma_cmd_buf *buf;
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	list_for_each_entry(buf, &q->pending, node)
		complete(&buf->done);
	spin_unlock_irqrestore(&q->lock, flags);
}

/* After the reset of the device: what it never answered. */
void vrdma_cmdq_drop(struct vrdma *vr)
{
	struct vrdma_cmd_buf *buf;

	if (!vr->cmdq.vq)
		return;
	while ((buf = virtqueue_detach_unused_buf(vr->cmdq.vq)))
		kfree(buf);
	vr->cmdq.vq = NULL;
}

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
		vrdma_lost(vr, "the device reports that it failed");
		return -EIO;
	default:
		dev_err(&vr->vdev->dev, "unknown command status %u\n", status);
		return -EIO;
	}
}

static int vrdma_cmdq_submit(struct vrdma *vr, struct vrdma_cmd_buf *buf)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	struct scatterlist out, in, *sgs[2] = { &out, &in };
	unsigned long flags;
	int ret;

	sg_init_one(&out, buf->data, buf->req_len);
	sg_init_one(&in, buf->resp, buf->resp_len);
	spin_lock_irqsave(&q->lock, flags);
	if (vrdma_is_lost(vr)) {
		ret = -EIO;
	} else {
		ret = virtqueue_add_sgs(q->vq, sgs, 1, 1, buf, GFP_ATOMIC);
		if (!ret) {
			list_add_tail(&buf->node, &q->pending);
			virtqueue_kick(q->vq);
		}
	}
	spin_unlock_irqrestore(&q->lock, flags);
	return ret;
}

static bool vrdma_cmdq_poll(struct vrdma_cmdq *q, struct vrdma_cmd_buf *buf, u64 *answered)
{
	unsigned long flags;
	bool finished;

	spin_lock_irqsave(&q->lock, flags);
	vrdma_cmdq_reap(q);
	finished = buf->finished;
	*answered = q->answered;
	spin_unlock_irqrestore(&q->lock, flags);
	return finished;
}

/* True when the device answered. Otherwise the wait is over, or the device is lost. */
static bool vrdma_cmdq_wait(struct vrdma *vr, struct vrdma_cmd_buf *buf, bool atomic)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	u64 seen = 0, answered;
	u32 idle_us = 0;

	for (;;) {
		/* Polling here also covers an interrupt that got lost or is disabled by the caller. */
		if (vrdma_cmdq_poll(q, buf, &answered))
			return true;
		if (vrdma_is_lost(vr))
			return false;
		if (answered != seen) {
			seen = answered;
			idle_us = 0;
		}
		if (idle_us >= VRDMA_CMD_TIMEOUT_MS * 1000u)
			return false;
		if (atomic) {
			udelay(2);
			idle_us += 2;
		} else {
			wait_for_completion_timeout(&buf->done, msecs_to_jiffies(500));
			idle_us += 500000;
		}
	}
}

static int vrdma_cmd_finish(struct vrdma *vr, struct vrdma_cmd_buf *buf, void *resp, size_t resp_len)
{
	const struct virtio_rdma_resp_hdr *hdr = (const void *)buf->resp;
	int ret;

	if (buf->used < sizeof(*hdr)) {
		vrdma_lost(vr, "a response without a header");
		return -EIO;
	}
	ret = vrdma_status_to_errno(vr, le32_to_cpu(hdr->status));
	if (ret)
		return ret;
	if (buf->used < sizeof(*hdr) + resp_len) {
		vrdma_lost(vr, "a response that is too short");
		return -EIO;
	}
	if (resp_len)
		memcpy(resp, buf->resp + sizeof(*hdr), resp_len);
	return 0;
}

static int vrdma_cmd_run(struct vrdma *vr, struct vrdma_cmd_buf *buf, bool atomic)
{
	struct vrdma_cmdq *q = &vr->cmdq;
	unsigned long flags;
	bool finished;
	int ret;

	ret = vrdma_cmdq_submit(vr, buf);
	if (ret) {
		kfree(buf);
		return ret == -ENOSPC ? -EAGAIN : ret;
	}
	finished = vrdma_cmdq_wait(vr, buf, atomic);
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

static int __vrdma_cmd(struct vrdma *vr, u16 opcode, u32 ctx, const void *req, size_t req_len, void *resp,
		       size_t resp_len, bool atomic)
{
	size_t out = sizeof(struct virtio_rdma_cmd_hdr) + req_len;
	size_t in = sizeof(struct virtio_rdma_resp_hdr) + resp_len;
	struct virtio_rdma_cmd_hdr *hdr;
	struct vrdma_cmd_buf *buf;
	int ret;

	if (vrdma_is_lost(vr))
		return -EIO;
	buf = kzalloc(sizeof(*buf) + ALIGN(out, 8) + in, atomic ? GFP_ATOMIC : GFP_KERNEL);
	if (!buf)
		return -ENOMEM;
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

	if (!atomic)
		down(&vr->cmdq.slots);
	ret = vrdma_cmd_run(vr, buf, atomic);
	if (!atomic)
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
	ret = vrdma_cmd_finish(vr, buf, resp, resp_len);
	if (ret)
		dev_dbg(&vr->vdev->dev, "command 0x%x in context %u: %d\n", opcode, ctx, ret);
	kfree(buf);
	return ret;
}

int vrdma_cmd(struct vrdma *vr, u16 opcode, u32 ctx, const void *req, size_t req_len, void *resp,
	      size_t resp_len)
{
	might_sleep();
	return __vrdma_cmd(vr, opcode, ctx, req, req_len, resp, resp_len, false);
}

int vrdma_cmd_atomic(struct vrdma *vr, u16 opcode, u32 ctx, const void *req, size_t req_len, void *resp,
		     size_t resp_len)
{
	return __vrdma_cmd(vr, opcode, ctx, req, req_len, resp, resp_len, true);
}

/*
 * Destruction must not fail because the device is lost: the object then ends for us, and only its memory waits for the reset (`device_is_done`
 * false). A refusal (-EBUSY) keeps the object.
 */
int vrdma_cmd_destroy(struct vrdma *vr, u16 opcode, u32 ctx, u32 object, bool *device_is_done)
{
	struct virtio_rdma_object_req req = { .object = cpu_to_le32(object) };
	int ret;

	ret = vrdma_cmd(vr, opcode, ctx, &req, sizeof(req), NULL, 0);
	*device_is_done = !ret;
	if (ret && vrdma_is_lost(vr))
		return 0;
	return ret;
}
