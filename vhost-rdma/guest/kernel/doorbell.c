// SPDX-License-Identifier: GPL-2.0
/*
 * Doorbell pages, the doorbell protocol of the kernel's own queues, and notifications.
 *
 * The device takes slots out of the pages of a context by itself. The driver counts how many are in
 * use, so that it adds a page when there are too few, and so that nobody can make it add pages by
 * requests that fail for another reason.
 */
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/virtio_pci.h>
#ifdef CONFIG_X86
#include <asm/pgtable_types.h>
#endif
#include "virtio_rdma.h"

void vrdma_ctx_init(struct vrdma *vr, struct vrdma_ctx *ctx)
{
	ctx->vr = vr;
	mutex_init(&ctx->lock);
	ctx->pages = NULL;
	ctx->npages = 0;
	ctx->slots_used = 0;
}

int vrdma_ctx_append_page(struct vrdma_ctx *ctx, struct vrdma_mem *mem,
			  struct vrdma_mmap *mmap)
{
	struct vrdma_db_page *pages;

	pages = krealloc(ctx->pages, (ctx->npages + 1) * sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	pages[ctx->npages].mem = mem;
	pages[ctx->npages].mmap = mmap;
	ctx->pages = pages;
	ctx->npages++;
	return 0;
}

void vrdma_ctx_drop_pages(struct vrdma_ctx *ctx, bool device_is_done)
{
	u32 i;

	for (i = 0; i < ctx->npages; i++)
		vrdma_mem_put(ctx->vr, ctx->pages[i].mem, device_is_done);
	kfree(ctx->pages);
	ctx->pages = NULL;
	ctx->npages = 0;
}

static int vrdma_ctx_add_page(struct vrdma_ctx *ctx, struct ib_ucontext *ibuc)
{
	struct virtio_rdma_db_page_add_req req = {};
	struct virtio_rdma_db_page_add_resp resp;
	struct vrdma *vr = ctx->vr;
	struct vrdma_mmap *mmap = NULL;
	struct vrdma_mem *mem;
	int ret;

	mem = vrdma_mem_page(vr);
	if (IS_ERR(mem))
		return PTR_ERR(mem);
	if (ibuc) {
		mmap = vrdma_mmap_insert(ibuc, VRDMA_MMAP_DOORBELL, mem->page, 0);
		if (IS_ERR(mmap)) {
			vrdma_mem_put(vr, mem, true);
			return PTR_ERR(mmap);
		}
	}
	/*
	 * Room first: once the device knows the page there is no way to take it back but with the
	 * context.
	 */
	ret = vrdma_ctx_append_page(ctx, mem, mmap);
	if (ret) {
		if (mmap)
			rdma_user_mmap_entry_remove(&mmap->entry);
		vrdma_mem_put(vr, mem, true);
		return ret;
	}
	req.db_page = cpu_to_le64(mem->dma[0]);
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_DB_PAGE_ADD, ctx->id, &req, sizeof(req), &resp,
			sizeof(resp));
	if (!ret && le32_to_cpu(resp.page) == ctx->npages - 1)
		return 0;
	if (!ret) {
		vrdma_failed(vr, "doorbell pages are numbered out of order");
		ret = -EIO;
	}
	ctx->npages--;
	if (mmap)
		rdma_user_mmap_entry_remove(&mmap->entry);
	vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
	return ret;
}

int vrdma_ctx_reserve_slots(struct vrdma_ctx *ctx, struct ib_ucontext *ibuc, u32 count)
{
	int ret = 0;

	mutex_lock(&ctx->lock);
	if (ctx->slots_used + count > ctx->npages * VIRTIO_RDMA_DB_SLOTS)
		ret = vrdma_ctx_add_page(ctx, ibuc);
	if (!ret)
		ctx->slots_used += count;
	mutex_unlock(&ctx->lock);
	return ret;
}

void vrdma_ctx_release_slots(struct vrdma_ctx *ctx, u32 count)
{
	mutex_lock(&ctx->lock);
	ctx->slots_used -= count;
	mutex_unlock(&ctx->lock);
}

static void *vrdma_db_page(struct vrdma_ctx *ctx, u32 db)
{
	u32 page = db >> VIRTIO_RDMA_DB_PAGE_SHIFT;
	u32 slot = db & GENMASK(VIRTIO_RDMA_DB_PAGE_SHIFT - 1, 0);

	if (db == VIRTIO_RDMA_DB_NONE || slot >= VIRTIO_RDMA_DB_SLOTS)
		return NULL;
	if (page >= READ_ONCE(ctx->npages))
		return NULL;
	return page_address(ctx->pages[page].mem->page);
}

u64 vrdma_db_mmap_offset(struct vrdma_ctx *ctx, u32 db)
{
	u32 page = db >> VIRTIO_RDMA_DB_PAGE_SHIFT;
	u64 offset = 0;

	mutex_lock(&ctx->lock);
	if (vrdma_db_page(ctx, db))
		offset = rdma_user_mmap_get_offset(&ctx->pages[page].mmap->entry);
	mutex_unlock(&ctx->lock);
	return offset;
}

/*
 * The word of the producer index; NULL for a number that is none. The words stay where they are
 * while the context lives.
 */
__le32 *vrdma_db_index(struct vrdma_ctx *ctx, u32 db)
{
	__le32 *index = NULL;
	void *base;

	mutex_lock(&ctx->lock);
	base = vrdma_db_page(ctx, db);
	if (base)
		index = base + VIRTIO_RDMA_DB_INDEX + 4 * (db & 0xffff);
	mutex_unlock(&ctx->lock);
	return index;
}

/*
 * Section 6.4, steps 2 to 5. mb(), not smp_mb(): the other side is a thread of the host, also
 * when this kernel runs on one CPU and the SMP barriers are compiled away. `index` lies in the
 * page: page and group are found from its address.
 */
void vrdma_doorbell(struct vrdma *vr, u32 queue, __le32 *index, u32 producer)
{
	u8 *base = (u8 *)((unsigned long)index & ~((unsigned long)VIRTIO_RDMA_PAGE_SIZE - 1));
	u32 slot = ((u8 *)index - base - VIRTIO_RDMA_DB_INDEX) / 4;
	u8 *summary = base + VIRTIO_RDMA_DB_SUMMARY + slot / VIRTIO_RDMA_DB_GROUP_SLOTS;
	__le32 *need_kick = vrdma_status(vr) + VIRTIO_RDMA_STATUS_NEED_KICK;

	/* The requests first, */
	virt_store_release(index, cpu_to_le32(producer));
	/* then the index, */
	virt_store_release(summary, 1);
	/* The device must see the summary byte, or we its wish to be kicked. */
	mb();
	if (READ_ONCE(*need_kick))
		vrdma_kick(vr, queue);
}

void vrdma_kick(struct vrdma *vr, u32 queue)
{
	if (!vrdma_is_lost(vr))
		virtqueue_notify(vr->vqs[queue]);
}

/* ---- The notify page ---- */

/*
 * queue_notify_off can not be read without the transport. It is the queue's index in the monitors
 * that we know; that it is so here is checked where the address of the kernel's own mapping can be
 * had. Elsewhere processes kick by the ioctl: a page that kicks nothing would be a lost wake-up.
 */
static bool vrdma_notify_is_at(struct virtqueue *vq, u64 phys)
{
#ifdef CONFIG_X86
	return vq->priv && slow_virt_to_phys(vq->priv) == phys;
#else
	return false;
#endif
}

/*
 * Where a user store notifies a queue: the notification structure of virtio-pci (virtio 1.2,
 * section 4.1.4.4). A page can be given to a process only if it notifies one queue, that is if
 * the multiplier is a page at least. The capability is read by ourselves, because the transport
 * keeps the address to itself; what it does show (the mapped address in vq->priv) is not
 * portable.
 */
void vrdma_find_notify(struct vrdma *vr)
{
	struct device *parent = vr->vdev->dev.parent;
	u32 offset, length, multiplier, i;
	struct pci_dev *pdev;
	u64 base;
	u8 type, bar;
	int pos;

	if (!parent || !dev_is_pci(parent))
		return;
	pdev = to_pci_dev(parent);
	for (pos = pci_find_capability(pdev, PCI_CAP_ID_VNDR); pos;
	     pos = pci_find_next_capability(pdev, pos, PCI_CAP_ID_VNDR)) {
		pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, cfg_type), &type);
		if (type == VIRTIO_PCI_CAP_NOTIFY_CFG)
			break;
	}
	if (!pos)
		return;
	pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, bar), &bar);
	pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_cap, offset), &offset);
	pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_cap, length), &length);
	pci_read_config_dword(pdev,
			      pos + offsetof(struct virtio_pci_notify_cap, notify_off_multiplier),
			      &multiplier);
	if (bar >= PCI_STD_NUM_BARS || multiplier < PAGE_SIZE || multiplier % PAGE_SIZE)
		return;
	base = pci_resource_start(pdev, bar) + offset;
	if (base % PAGE_SIZE || (u64)vr->num_vqs * multiplier > length)
		return;
	/* With notification data the stored value is not the queue's index. */
	if (virtio_has_feature(vr->vdev, VIRTIO_F_NOTIFICATION_DATA))
		return;
	for (i = 0; i < vr->num_vqs; i++)
		if (!vrdma_notify_is_at(vr->vqs[i], base + (u64)i * multiplier))
			return;
	if (!vr->notify_phys)
		vr->notify_phys = devm_kcalloc(&vr->vdev->dev, vr->num_vqs,
					       sizeof(*vr->notify_phys), GFP_KERNEL);
	for (i = 0; vr->notify_phys && i < vr->num_vqs; i++)
		vr->notify_phys[i] = base + (u64)i * multiplier;
}
