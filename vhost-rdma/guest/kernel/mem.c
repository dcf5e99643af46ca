// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that the device reaches, and the page lists that describe it (docs/virtio-rdma.md, section 6.1).
 *
 * Every address given to the device is a guest physical address; probe has made sure that DMA addresses are just that. A page list takes the largest page
 * size by which the pinned memory can be cut, so that a region of huge pages is a short list.
 */
#include <linux/highmem.h>
#include <linux/ioport.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include "virtio_rdma.h"

#define VRDMA_ENTRIES	VIRTIO_RDMA_LIST_PAGE_ENTRIES

/* ---- Memory ---- */

static struct vrdma_mem *vrdma_mem_alloc(void)
{
	struct vrdma_mem *mem = kzalloc(sizeof(*mem), GFP_KERNEL);

	if (mem)
		INIT_LIST_HEAD(&mem->orphan);
	return mem;
}

struct vrdma_mem *vrdma_mem_user(struct ib_device *ib, u64 addr, u64 length, int access)
{
	struct vrdma_mem *mem = vrdma_mem_alloc();
	struct ib_umem *umem;

	if (!mem)
		return ERR_PTR(-ENOMEM);
	umem = vrdma_umem_get(ib, addr, length, access);
	if (IS_ERR(umem)) {
		kfree(mem);
		return ERR_CAST(umem);
	}
	mem->umem = umem;
	return mem;
}

/* A ring of a process: page-aligned, and as long as its layout needs. */
struct vrdma_mem *vrdma_mem_user_ring(struct ib_device *ib, u64 addr, u32 given, u64 needed)
{
	if (!PAGE_ALIGNED(addr) || given < needed || !needed)
		return ERR_PTR(-EINVAL);
	return vrdma_mem_user(ib, addr, given, IB_ACCESS_LOCAL_WRITE);
}

struct vrdma_mem *vrdma_mem_ring(size_t length)
{
	struct vrdma_mem *mem = vrdma_mem_alloc();

	if (!mem)
		return ERR_PTR(-ENOMEM);
	mem->vaddr = vzalloc(length);
	if (!mem->vaddr) {
		kfree(mem);
		return ERR_PTR(-ENOMEM);
	}
	return mem;
}

struct vrdma_mem *vrdma_mem_page(void)
{
	struct vrdma_mem *mem = vrdma_mem_alloc();

	if (!mem)
		return ERR_PTR(-ENOMEM);
	mem->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!mem->page) {
		kfree(mem);
		return ERR_PTR(-ENOMEM);
	}
	return mem;
}

static void vrdma_mem_free(struct vrdma_mem *mem)
{
	if (mem->umem)
		ib_umem_release(mem->umem);
	vfree(mem->vaddr);
	if (mem->page)
		put_page(mem->page);
	kfree(mem);
}

void vrdma_mem_put(struct vrdma *vr, struct vrdma_mem *mem, bool device_is_done)
{
	if (IS_ERR_OR_NULL(mem))
		return;
	if (device_is_done) {
		vrdma_mem_free(mem);
		return;
	}
	spin_lock(&vr->orphan_lock);
	if (list_empty(&vr->orphans))
		dev_warn(&vr->vdev->dev, "memory that the device may still use is kept until it is reset\n");
	list_add_tail(&mem->orphan, &vr->orphans);
	spin_unlock(&vr->orphan_lock);
}

/* The device is reset: nobody touches this memory any more. */
void vrdma_free_orphans(struct vrdma *vr)
{
	struct vrdma_mem *mem, *next;
	u32 count = 0;

	list_for_each_entry_safe(mem, next, &vr->orphans, orphan) {
		list_del(&mem->orphan);
		vrdma_mem_free(mem);
		count++;
	}
	if (count)
		dev_info(&vr->vdev->dev, "%u pieces of memory were kept until the reset\n", count);
}

/* ---- Page lists ---- */

static int vrdma_page_list_alloc(struct vrdma_page_list *list, u64 npages)
{
	u64 total = 0, count = npages;
	u8 levels = 0;

	if (!npages || npages > U32_MAX)
		return -EINVAL;
	while (count > 1 || (npages > 1 && !levels)) {
		count = DIV_ROUND_UP_ULL(count, VRDMA_ENTRIES);
		total += count;
		levels++;
	}
	if (levels > VIRTIO_RDMA_MAX_LIST_LEVELS)
		return -EINVAL;
	list->desc.npages = cpu_to_le32(npages);
	list->desc.levels = levels;
	if (!total)
		return 0;
	list->pages = kvcalloc(total, sizeof(*list->pages), GFP_KERNEL);
	if (!list->pages)
		return -ENOMEM;
	for (; list->npages < total; list->npages++) {
		list->pages[list->npages] = get_zeroed_page(GFP_KERNEL);
		if (!list->pages[list->npages])
			return -ENOMEM;
	}
	return 0;
}

static void vrdma_page_list_add(struct vrdma_page_list *list, u64 addr)
{
	u32 i = list->filled++;
	__le64 *leaf;

	if (!list->npages) {
		list->desc.addr = cpu_to_le64(addr);
		return;
	}
	leaf = (__le64 *)list->pages[i / VRDMA_ENTRIES];
	leaf[i % VRDMA_ENTRIES] = cpu_to_le64(addr);
}

/* Joins the leaves to a tree whose root is the last page. */
static void vrdma_page_list_link(struct vrdma_page_list *list)
{
	u32 first = 0, count = DIV_ROUND_UP(list->filled, VRDMA_ENTRIES), parents, i;
	__le64 *parent;

	if (!list->npages)
		return;
	while (count > 1) {
		parents = first + count;
		for (i = 0; i < count; i++) {
			parent = (__le64 *)list->pages[parents + i / VRDMA_ENTRIES];
			parent[i % VRDMA_ENTRIES] = cpu_to_le64(virt_to_phys((void *)list->pages[first + i]));
		}
		first = parents;
		count = DIV_ROUND_UP(count, VRDMA_ENTRIES);
	}
	list->desc.addr = cpu_to_le64(virt_to_phys((void *)list->pages[first]));
}

static bool vrdma_block_is_ram(u64 addr, unsigned long size)
{
	return page_is_ram(addr >> PAGE_SHIFT) && page_is_ram((addr + size - 1) >> PAGE_SHIFT);
}

/*
 * The first and the last block may reach beyond the pinned memory. That harms nothing, as long as they lie in guest memory as a whole:
 * near its end, or near a hole, only the base page size is safe.
 */
static unsigned long vrdma_umem_block_size(struct ib_umem *umem)
{
	unsigned long size = ib_umem_find_best_pgsz(umem, GENMASK(30, 12), umem->address);
	struct ib_block_iter iter;
	u64 first = 0, last = 0;
	bool any = false;

	if (size <= SZ_4K)
		return size;
	rdma_umem_for_each_dma_block(umem, &iter, size) {
		last = rdma_block_iter_dma_address(&iter);
		if (!any)
			first = last;
		any = true;
	}
	if (any && vrdma_block_is_ram(first, size) && vrdma_block_is_ram(last, size))
		return size;
	return ib_umem_find_best_pgsz(umem, SZ_4K, umem->address);
}

static int vrdma_page_list_umem(struct vrdma_page_list *list, struct ib_umem *umem)
{
	unsigned long size = vrdma_umem_block_size(umem);
	struct ib_block_iter iter;
	int ret;

	if (!size)
		return -EINVAL;
	ret = vrdma_page_list_alloc(list, ib_umem_num_dma_blocks(umem, size));
	if (ret)
		return ret;
	list->desc.page_shift = ilog2(size);
	list->desc.offset = cpu_to_le32(umem->address & (size - 1));
	rdma_umem_for_each_dma_block(umem, &iter, size)
		vrdma_page_list_add(list, rdma_block_iter_dma_address(&iter));
	return 0;
}

static int vrdma_page_list_vmalloc(struct vrdma_page_list *list, void *vaddr, size_t length)
{
	/* With larger base pages a page is several of the device's. */
	size_t at;
	int ret;

	ret = vrdma_page_list_alloc(list, DIV_ROUND_UP(length, PAGE_SIZE));
	if (ret)
		return ret;
	list->desc.page_shift = PAGE_SHIFT;
	for (at = 0; at < length; at += PAGE_SIZE)
		vrdma_page_list_add(list, page_to_phys(vmalloc_to_page(vaddr + at)));
	return 0;
}

int vrdma_page_list_build(struct vrdma_page_list *list, struct vrdma_mem *mem, size_t length)
{
	int ret;

	memset(list, 0, sizeof(*list));
	if (mem->umem)
		ret = vrdma_page_list_umem(list, mem->umem);
	else
		ret = vrdma_page_list_vmalloc(list, mem->vaddr, length);
	if (!ret && list->filled != le32_to_cpu(list->desc.npages))
		ret = -EFAULT;
	if (!ret)
		vrdma_page_list_link(list);
	return ret;
}

/*
 * The device reads list pages while it executes the command and never afterwards. Only when it never answered they have to stay: then they are given up for
 * good, a few pages in the whole life of a device.
 */
void vrdma_page_list_free(struct vrdma *vr, struct vrdma_page_list *list)
{
	u32 i;

	if (vrdma_is_lost(vr) && list->npages) {
		dev_warn(&vr->vdev->dev, "%u list pages are given up\n", list->npages);
	} else {
		for (i = 0; i < list->npages; i++)
			free_page(list->pages[i]);
	}
	kvfree(list->pages);
	list->pages = NULL;
	list->npages = 0;
}
