// SPDX-License-Identifier: GPL-2.0
/*
 * Loss of the device, and its way back (docs/virtio-rdma.md, section 5.6).
 *
 * A device is lost when it says so, or when it says nothing. Either way everything fails at once
 * and programs get DEVICE_FATAL. A device that says so has somebody behind it, who lost the
 * objects: it is started again, in the running machine, as after a sleep. One that says nothing is
 * left alone, since some monitors abort the machine when a device is started with nobody behind it;
 * should it answer after all, it has spoken.
 *
 * The way back is one work item, and the only one besides probe, remove, freeze and restore that
 * starts and stops the device. Those never run beside each other (the driver core sees to it), and
 * remove and freeze forbid the work item and wait for it before they begin: so starts and stops
 * need no lock. What a wait costs is bounded: each command in it is.
 */
#include <linux/jiffies.h>
#include <linux/virtio_config.h>
#include "virtio_rdma.h"

#define VRDMA_RESTART_FIRST_MS	100u
#define VRDMA_RESTART_MOST_MS	30000u
/* A life that lasted so long was none that ended at once. */
#define VRDMA_RESTART_CALM_MS	60000u
/* So many starts in a row that failed, and the device stays off. */
#define VRDMA_RESTART_TRIES	10u

/* ---- Loss ---- */

static void vrdma_lost_work(struct work_struct *work)
{
	struct vrdma *vr = container_of(work, struct vrdma, lost_work);

	/* Consumers first: an unregistration that waits for them may hold the lock below. */
	vrdma_wake_all_cqs(vr);
}

void vrdma_set_alive(struct vrdma *vr, u32 value)
{
	__le32 *alive = vrdma_status(vr) + VIRTIO_RDMA_STATUS_ALIVE;

	/* Whoever sees it finds what was done before. */
	virt_store_release(alive, cpu_to_le32(value));
}

/* From any context, any number of times. */
void vrdma_lost(struct vrdma *vr, const char *why)
{
	unsigned long flags;
	bool was;

	spin_lock_irqsave(&vr->restart_lock, flags);
	was = vr->lost;
	if (!was) {
		vr->lost_at = jiffies;
		WRITE_ONCE(vr->lost, true);
	}
	spin_unlock_irqrestore(&vr->restart_lock, flags);
	if (was)
		return;
	dev_err(&vr->vdev->dev, "the device is lost: %s\n", why);
	vrdma_set_alive(vr, 0);
	vrdma_cmdq_fail_all(vr);
	vrdma_ib_event(vr, IB_EVENT_DEVICE_FATAL);
	schedule_work(&vr->lost_work);
}

/* The same, by what the device itself said. */
void vrdma_failed(struct vrdma *vr, const char *why)
{
	vrdma_lost(vr, why);
	vrdma_heard(vr);
}

static void vrdma_keepalive(struct work_struct *work)
{
	struct vrdma *vr = container_of(to_delayed_work(work), struct vrdma, keepalive);
	struct virtio_rdma_keepalive_req req = { .nonce = cpu_to_le64(vr->nonce) };
	int ret;

	if (vrdma_is_lost(vr) || !atomic_read(&vr->users))
		return;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_KEEPALIVE, 0, &req, sizeof(req), NULL, 0);
	if (ret && ret != -EAGAIN && ret != -ENOMEM) {
		vrdma_lost(vr, "a keepalive failed");
		return;
	}
	queue_delayed_work(system_long_wq, &vr->keepalive,
			   msecs_to_jiffies(vrdma_attr32(vr->attr.keepalive_ms)));
}

/*
 * Section 5.5: somebody could wait for a device that is gone, a process or a QP; the kernel's own
 * consumers too.
 */
void vrdma_keepalive_while_used(struct vrdma *vr)
{
	if (atomic_inc_return(&vr->users) == 1 && vr->attr.keepalive_ms)
		mod_delayed_work(system_long_wq, &vr->keepalive,
				 msecs_to_jiffies(vrdma_attr32(vr->attr.keepalive_ms)));
}

void vrdma_unused(struct vrdma *vr)
{
	atomic_dec(&vr->users);
}

/* ---- When it comes back ---- */

/* In jiffies from now. The wait begins with the loss: silence in between is part of it. */
static unsigned long vrdma_restart_delay(struct vrdma *vr)
{
	unsigned long calm = vr->restarted + msecs_to_jiffies(VRDMA_RESTART_CALM_MS);
	unsigned long now = jiffies, at;
	u32 wait_ms;

	lockdep_assert_held(&vr->restart_lock);
	if (vr->up && time_after(now, calm))
		vr->restarts = 0;
	wait_ms = min(VRDMA_RESTART_FIRST_MS << min(vr->restarts, 16u), VRDMA_RESTART_MOST_MS);
	at = vr->lost_at + msecs_to_jiffies(wait_ms);
	return time_after(at, now) ? at - now : 0;
}

/*
 * The device has spoken: somebody is behind it. If it is lost it will be started again. From any
 * context, any number of times.
 */
void vrdma_heard(struct vrdma *vr)
{
	bool queued = false;
	unsigned long flags;

	if (!vrdma_is_lost(vr))
		return;
	spin_lock_irqsave(&vr->restart_lock, flags);
	if (vr->may_restart && vr->refusals < VRDMA_RESTART_TRIES)
		queued = queue_delayed_work(system_long_wq, &vr->restart, vrdma_restart_delay(vr));
	spin_unlock_irqrestore(&vr->restart_lock, flags);
	if (queued)
		dev_info(&vr->vdev->dev, "the device speaks and will be started again\n");
}

/* From now on, and also for what it said before. */
void vrdma_restart_allow(struct vrdma *vr)
{
	spin_lock_irq(&vr->restart_lock);
	vr->may_restart = true;
	vr->restarts = 0;
	vr->refusals = 0;
	vr->restarted = jiffies;
	spin_unlock_irq(&vr->restart_lock);
	if (!READ_ONCE(vr->silent))
		vrdma_heard(vr);
}

/* The caller alone starts and stops the device from here on. */
void vrdma_restart_forbid(struct vrdma *vr)
{
	spin_lock_irq(&vr->restart_lock);
	vr->may_restart = false;
	spin_unlock_irq(&vr->restart_lock);
	cancel_delayed_work_sync(&vr->restart);
}

/* ---- The way back ---- */

/*
 * False if nobody is there: then the device is left as it is, and heard when its queue is answered.
 * Asked for the second time because consumers may take long to let go.
 */
static bool vrdma_end_life(struct vrdma *vr)
{
	if (!vrdma_cmd_ask(vr))
		return false;
	mutex_lock(&vr->ib_lock);
	vrdma_ib_unregister(vr);
	mutex_unlock(&vr->ib_lock);
	if (!vrdma_cmd_ask(vr))
		return false;
	vrdma_stop(vr);
	return true;
}

/* What the virtio core does before probe and restore: those features that were agreed on. */
static int vrdma_acknowledge(struct virtio_device *vdev)
{
	int ret;

	virtio_add_status(vdev, VIRTIO_CONFIG_S_ACKNOWLEDGE);
	virtio_add_status(vdev, VIRTIO_CONFIG_S_DRIVER);
	ret = vdev->config->finalize_features(vdev);
	if (ret)
		return ret;
	virtio_add_status(vdev, VIRTIO_CONFIG_S_FEATURES_OK);
	if (!(vdev->config->get_status(vdev) & VIRTIO_CONFIG_S_FEATURES_OK))
		return -ENODEV;
	return 0;
}

static int vrdma_begin_life(struct vrdma *vr)
{
	int ret;

	spin_lock_irq(&vr->restart_lock);
	vr->restarts++;
	spin_unlock_irq(&vr->restart_lock);
	vr->silent = false;
	WRITE_ONCE(vr->lost, false);
	ret = vrdma_acknowledge(vr->vdev);
	if (ret)
		virtio_reset_device(vr->vdev);
	else
		ret = vrdma_up(vr);
	spin_lock_irq(&vr->restart_lock);
	vr->restarted = jiffies;
	vr->refusals = ret ? vr->refusals + 1 : 0;
	if (ret)
		vr->lost_at = jiffies;
	spin_unlock_irq(&vr->restart_lock);
	return ret;
}

static void vrdma_restart(struct work_struct *work)
{
	struct vrdma *vr = container_of(to_delayed_work(work), struct vrdma, restart);
	int ret;

	/* It may have spoken twice. */
	if (vr->up && !vrdma_is_lost(vr))
		return;
	if (vr->up && !vrdma_end_life(vr)) {
		dev_err(&vr->vdev->dev, "the device does not answer and is left alone\n");
		return;
	}
	ret = vrdma_begin_life(vr);
	if (!ret) {
		dev_info(&vr->vdev->dev, "the device was started again\n");
		vrdma_netdev_pair(vr);
		return;
	}
	WRITE_ONCE(vr->lost, true);
	/* Started, and it has not answered yet: it is heard if it does. */
	if (vr->up)
		return;
	if (vr->refusals >= VRDMA_RESTART_TRIES)
		dev_err(&vr->vdev->dev, "the device stays off until it is bound or plugged anew\n");
	vrdma_heard(vr);
}

void vrdma_loss_init(struct vrdma *vr)
{
	spin_lock_init(&vr->restart_lock);
	INIT_WORK(&vr->lost_work, vrdma_lost_work);
	INIT_DELAYED_WORK(&vr->keepalive, vrdma_keepalive);
	INIT_DELAYED_WORK(&vr->restart, vrdma_restart);
}
