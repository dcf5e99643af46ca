// SPDX-License-Identifier: GPL-2.0
/*
 * The virtio RDMA driver: the virtio device from probe to remove, with as many sleeps in between
 * as the machine takes.
 *
 * A sleep is an end and a new beginning: the state of verbs objects lives in the device and does
 * not survive a reset, so that freeze does what remove does and restore what probe does, and only
 * `struct vrdma` stays. Programs lose the device as they do when it is unplugged. A device that was
 * lost and answers again has the same behind it (loss.c).
 *
 * The order at the end is the one that keeps memory safe (docs/virtio-rdma.md, section 5.3): the
 * RDMA device goes first and with it every object, then SHUTDOWN, then the virtio reset, and only
 * then is memory freed that the device may still have known.
 *
 * Configuration space is read here, once, and never again: under some monitors a later read is
 * fatal to the machine (section 4).
 */
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <linux/virtio_ids.h>
#include "virtio_rdma.h"

#define VRDMA_MAX_VQS	256u

/* ---- Start ---- */

static int vrdma_read_config(struct vrdma *vr)
{
	struct virtio_rdma_config cfg;
	__le32 *word = (__le32 *)&cfg;
	u32 i, vqs;

	/* By words: each access, of whatever width, may cost a message to the device process. */
	for (i = 0; i < sizeof(cfg) / sizeof(*word); i++)
		vr->vdev->config->get(vr->vdev, i * sizeof(*word), &word[i], sizeof(*word));
	if (le32_to_cpu(cfg.magic) != VIRTIO_RDMA_MAGIC) {
		dev_info(&vr->vdev->dev, "not an RDMA device (magic 0x%08x)\n",
			 le32_to_cpu(cfg.magic));
		return -ENODEV;
	}
	if (le32_to_cpu(cfg.abi_version) < VIRTIO_RDMA_ABI_VERSION) {
		dev_err(&vr->vdev->dev, "the device speaks ABI version %u, this driver %u\n",
			le32_to_cpu(cfg.abi_version), VIRTIO_RDMA_ABI_VERSION);
		return -EPROTONOSUPPORT;
	}
	vr->num_comp = le16_to_cpu(cfg.num_comp_vectors);
	vr->num_kick = le16_to_cpu(cfg.num_kick_queues);
	vqs = VIRTIO_RDMA_VQ_COMP_BASE + vr->num_comp + vr->num_kick;
	if (!vr->num_comp || !vr->num_kick || vqs > VRDMA_MAX_VQS) {
		dev_err(&vr->vdev->dev, "impossible numbers of queues: %u completion, %u kick\n",
			vr->num_comp, vr->num_kick);
		return -EINVAL;
	}
	vr->num_vqs = vqs;
	memcpy(vr->mac, cfg.mac, sizeof(vr->mac));
	return 0;
}

/*
 * Section 3: addresses are guest physical addresses, unless VIRTIO_F_ACCESS_PLATFORM says that they
 * are bus addresses. And both sides look at memory at once: nothing may lie between. Say why, when
 * that can not be.
 */
static int vrdma_check_dma(struct vrdma *vr)
{
	struct vrdma_mem *mem = vr->status_page;
	struct device *dev = &vr->vdev->dev;
	bool bus = virtio_has_feature(vr->vdev, VIRTIO_F_ACCESS_PLATFORM);

	if (dma_need_sync(vr->dma_dev, mem->dma[0])) {
		dev_err(dev,
			"bounce buffers (swiotlb=force, encrypted memory) or incoherent DMA: not supported\n");
		return -EOPNOTSUPP;
	}
	if (!bus && (mem->dma[0] != page_to_phys(mem->page) ||
		     dma_get_mask(vr->dma_dev) < dma_get_required_mask(vr->dma_dev))) {
		dev_err(dev,
			"DMA addresses are not guest physical addresses (IOMMU or narrow DMA mask), and the device does not offer VIRTIO_F_ACCESS_PLATFORM\n");
		return -EOPNOTSUPP;
	}
	dma_set_max_seg_size(vr->dma_dev, UINT_MAX);
	return 0;
}

static int vrdma_setup_vqs(struct vrdma *vr)
{
	u32 first_kick = VIRTIO_RDMA_VQ_COMP_BASE + vr->num_comp, i;
	struct virtqueue_info *info;
	int ret;

	info = kcalloc(vr->num_vqs, sizeof(*info), GFP_KERNEL);
	if (!info)
		return -ENOMEM;
	for (i = VIRTIO_RDMA_VQ_COMP_BASE; i < vr->num_vqs; i++) {
		info[i].name = i < first_kick ? "completion" : "kick";
		info[i].callback = i < first_kick ? vrdma_comp_callback : NULL;
	}
	info[VIRTIO_RDMA_VQ_CONTROL].name = "control";
	info[VIRTIO_RDMA_VQ_CONTROL].callback = vrdma_cmdq_callback;
	info[VIRTIO_RDMA_VQ_EVENT].name = "event";
	info[VIRTIO_RDMA_VQ_EVENT].callback = vrdma_event_callback;
	ret = vrdma_find_vqs(vr->vdev, vr->num_vqs, vr->vqs, info);
	kfree(info);
	return ret;
}

static int vrdma_find_queues(struct vrdma *vr)
{
	struct device *dev = &vr->vdev->dev;
	int ret;
	u32 i;

	/* Once: they serve again after a sleep. */
	if (!vr->vqs)
		vr->vqs = devm_kcalloc(dev, vr->num_vqs, sizeof(*vr->vqs), GFP_KERNEL);
	if (!vr->comp_eqs)
		vr->comp_eqs = devm_kcalloc(dev, vr->num_comp, sizeof(*vr->comp_eqs), GFP_KERNEL);
	if (!vr->vqs || !vr->comp_eqs)
		return -ENOMEM;
	ret = vrdma_setup_vqs(vr);
	if (ret)
		return ret;
	vrdma_cmdq_init(vr, vr->vqs[VIRTIO_RDMA_VQ_CONTROL]);
	ret = vrdma_eq_init(vr, &vr->event_eq, vr->vqs[VIRTIO_RDMA_VQ_EVENT],
			    sizeof(struct virtio_rdma_async_event));
	for (i = 0; i < vr->num_comp && !ret; i++)
		ret = vrdma_eq_init(vr, &vr->comp_eqs[i], vr->vqs[VIRTIO_RDMA_VQ_COMP_BASE + i],
				    sizeof(struct virtio_rdma_comp_event));
	return ret;
}

/* Only after the reset. */
static void vrdma_free_queues(struct vrdma *vr)
{
	u32 i;

	vrdma_cmdq_drop(vr);
	vrdma_eq_free(&vr->event_eq);
	for (i = 0; vr->comp_eqs && i < vr->num_comp; i++)
		vrdma_eq_free(&vr->comp_eqs[i]);
	vr->vdev->config->del_vqs(vr->vdev);
}

static int vrdma_init_device(struct vrdma *vr)
{
	struct virtio_rdma_init_req req = { .abi_version = cpu_to_le32(VIRTIO_RDMA_ABI_VERSION) };
	struct virtio_rdma_init_resp resp;
	int ret;

	do {
		vr->nonce = get_random_u64();
	} while (!lower_32_bits(vr->nonce));
	vrdma_set_alive(vr, lower_32_bits(vr->nonce));
	req.nonce = cpu_to_le64(vr->nonce);
	req.status_page = cpu_to_le64(vr->status_page->dma[0]);
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_INIT, 0, &req, sizeof(req), &resp, sizeof(resp));
	if (ret)
		return ret;
	if (le32_to_cpu(resp.abi_version) != VIRTIO_RDMA_ABI_VERSION)
		return -EPROTONOSUPPORT;
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_QUERY_DEVICE, 0, NULL, 0, &vr->attr, sizeof(vr->attr));
	if (ret)
		return ret;
	vr->caps = le64_to_cpu(vr->attr.caps);
	vrdma_ctx_init(vr, &vr->kctx);
	/*
	 * Section 5.4: the kernel's kick queue is the first one. Its doorbell page is added when it
	 * is needed.
	 */
	vr->kctx.kick_queue = VIRTIO_RDMA_VQ_COMP_BASE + vr->num_comp;
	return 0;
}

static int vrdma_start(struct vrdma *vr)
{
	u32 i;
	int ret;

	virtio_device_ready(vr->vdev);
	ret = vrdma_eq_stock(&vr->event_eq);
	for (i = 0; i < vr->num_comp && !ret; i++)
		ret = vrdma_eq_stock(&vr->comp_eqs[i]);
	if (!ret)
		ret = vrdma_init_device(vr);
	if (ret) {
		dev_err(&vr->vdev->dev, "the device could not be initialised: %d\n", ret);
		return ret;
	}
	vrdma_find_notify(vr);
	return 0;
}

static struct vrdma *vrdma_new(struct virtio_device *vdev)
{
	struct vrdma *vr = kzalloc(sizeof(*vr), GFP_KERNEL);

	if (!vr)
		return NULL;
	vr->vdev = vdev;
	vr->dma_dev = vdev->dev.parent;
	xa_init_flags(&vr->qps, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&vr->cqs, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&vr->srqs, XA_FLAGS_LOCK_IRQ);
	spin_lock_init(&vr->orphan_lock);
	INIT_LIST_HEAD(&vr->orphans);
	spin_lock_init(&vr->ah_lock);
	init_waitqueue_head(&vr->ah_wait);
	spin_lock_init(&vr->held_lock);
	INIT_LIST_HEAD(&vr->held);
	spin_lock_init(&vr->pair_lock);
	mutex_init(&vr->ib_lock);
	mutex_init(&vr->gid_lock);
	INIT_LIST_HEAD(&vr->gids);
	vrdma_loss_init(vr);
	return vr;
}

/* ---- Up and down ---- */

/* The device is reset; nobody uses the driver any more. */
static void vrdma_let_go(struct vrdma *vr)
{
	cancel_delayed_work_sync(&vr->keepalive);
	cancel_work_sync(&vr->lost_work);
	vrdma_ctx_drop_pages(&vr->kctx, true);
	vrdma_free_orphans(vr);
	mutex_lock(&vr->ib_lock);
	vrdma_ib_dealloc(vr);
	mutex_unlock(&vr->ib_lock);
	vrdma_mem_put(vr, vr->status_page, true);
	vr->status_page = NULL;
}

static void vrdma_set_up(struct vrdma *vr, bool up)
{
	mutex_lock(&vr->ib_lock);
	vr->up = up;
	mutex_unlock(&vr->ib_lock);
}

/*
 * A failure leaves nothing behind, but for one: a device that was started and did not answer is
 * `up`, for it may answer yet.
 */
int vrdma_up(struct vrdma *vr)
{
	int ret;

	vr->status_page = vrdma_mem_page(vr);
	if (IS_ERR(vr->status_page)) {
		ret = PTR_ERR(vr->status_page);
		goto err_free;
	}
	ret = vrdma_check_dma(vr);
	if (ret)
		goto err_free;
	ret = vrdma_find_queues(vr);
	if (ret)
		goto err_queues;
	ret = vrdma_start(vr);
	if (!ret || vr->silent) {
		vrdma_set_up(vr, true);
		return ret;
	}
	virtio_reset_device(vr->vdev);
err_queues:
	vrdma_free_queues(vr);
err_free:
	vrdma_let_go(vr);
	return ret;
}

/* What vrdma_up() made; the RDMA device is gone by now. */
void vrdma_stop(struct vrdma *vr)
{
	vrdma_set_up(vr, false);
	cancel_delayed_work_sync(&vr->keepalive);
	vrdma_cmd(vr, VIRTIO_RDMA_CMD_SHUTDOWN, 0, NULL, 0, NULL, 0);
	virtio_reset_device(vr->vdev);
	vrdma_free_queues(vr);
	vrdma_let_go(vr);
}

static int vrdma_begin(struct vrdma *vr)
{
	int ret = vrdma_up(vr);

	if (!ret)
		ret = vrdma_netdev_watch(vr);
	if (!ret)
		vrdma_restart_allow(vr);
	else if (vr->up)
		vrdma_stop(vr);
	return ret;
}

static void vrdma_end(struct vrdma *vr)
{
	vrdma_restart_forbid(vr);
	vrdma_netdev_unwatch(vr);
	if (vr->up)
		vrdma_stop(vr);
	else
		/* A start that failed; what is left is the status that the virtio core wrote. */
		virtio_reset_device(vr->vdev);
}

static void vrdma_free(struct vrdma *vr)
{
	vr->vdev->priv = NULL;
	kfree(vr);
}

static int vrdma_probe(struct virtio_device *vdev)
{
	struct vrdma *vr;
	int ret;

	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		dev_err(&vdev->dev, "a legacy device is not supported\n");
		return -ENODEV;
	}
	vr = vrdma_new(vdev);
	if (!vr)
		return -ENOMEM;
	vdev->priv = vr;
	ret = vrdma_read_config(vr);
	if (!ret)
		ret = vrdma_begin(vr);
	if (ret)
		vrdma_free(vr);
	return ret;
}

static void vrdma_remove(struct virtio_device *vdev)
{
	struct vrdma *vr = vdev->priv;

	vrdma_end(vr);
	vrdma_free(vr);
}

#ifdef CONFIG_PM_SLEEP
static int vrdma_freeze(struct virtio_device *vdev)
{
	vrdma_end(vdev->priv);
	return 0;
}

/*
 * A device whose process did not answer when the machine fell asleep is left alone: some monitors
 * abort the machine when such a device is started again (section 5.6). It comes back when it is
 * plugged anew.
 */
static int vrdma_restore(struct virtio_device *vdev)
{
	struct vrdma *vr = vdev->priv;

	if (vr->silent) {
		dev_err(&vdev->dev,
			"the device did not answer before the sleep and stays off: unplug it\n");
		return -ENODEV;
	}
	vr->lost = false;
	return vrdma_begin(vr);
}
#endif

static const struct virtio_device_id vrdma_ids[] = {
	{ VIRTIO_RDMA_DEVICE_ID, VIRTIO_DEV_ANY_ID },
	/* The lab's id: only if the magic says that it is ours. */
	{ VIRTIO_RDMA_LAB_DEVICE_ID, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, vrdma_ids);

static struct virtio_driver vrdma_driver = {
	.driver.name = KBUILD_MODNAME,
	.driver.owner = THIS_MODULE,
	.id_table = vrdma_ids,
	.probe = vrdma_probe,
	.remove = vrdma_remove,
#ifdef CONFIG_PM_SLEEP
	.freeze = vrdma_freeze,
	.restore = vrdma_restore,
#endif
};

module_virtio_driver(vrdma_driver);

MODULE_DESCRIPTION("Virtio RDMA device");
MODULE_AUTHOR("The vhost-rdma authors");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
