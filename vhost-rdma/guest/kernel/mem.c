// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that the device reaches, and the page lists that describe it (docs/virtio-rdma.md, section
 * 6.1).
 *
 * Every address given to the device comes from the DMA API: a guest physical address, or a bus
 * address where VIRTIO_F_ACCESS_PLATFORM is negotiated. Device and CPUs look at the same memory at
 * the same time for as long as an object lives, so that nothing is ever synchronised; probe refuses
 * a machine where that would be needed (vrdma_check_dma). A page list takes the largest page size
 * by which the pinned memory can be cut, so that a region of huge pages is a short list.
 */
#include <linux/dma-mapping.h>
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

/* Takes the umem, also when it fails. */
struct vrdma_mem *vrdma_mem_umem(struct ib_umem *umem)
{
	struct vrdma_mem *mem;

	if (IS_ERR(umem))
		return ERR_CAST(umem);
	mem = vrdma_mem_alloc();
	if (!mem) {
		ib_umem_release(umem);
		return ERR_PTR(-ENOMEM);
	}
	mem->umem = umem;
	return mem;
}

struct vrdma_mem *vrdma_mem_user(struct ib_device *ib, u64 addr, u64 length, int access)
{
	return vrdma_mem_umem(vrdma_umem_get(ib, addr, length, access));
}

/* A ring of a process: page-aligned, and as long as its layout needs. */
struct vrdma_mem *vrdma_mem_user_ring(struct ib_device *ib, u64 addr, u32 given, u64 needed)
{
	if (!PAGE_ALIGNED(addr) || given < needed || !needed)
		return ERR_PTR(-EINVAL);
	return vrdma_mem_user(ib, addr, given, IB_ACCESS_LOCAL_WRITE);
}

static void vrdma_mem_free(struct vrdma *vr, struct vrdma_mem *mem)
{
	u32 i;

	if (mem->umem)
		ib_umem_release(mem->umem);
	for (i = 0; i < mem->npages; i++)
		dma_unmap_page(vr->dma_dev, mem->dma[i], PAGE_SIZE, DMA_BIDIRECTIONAL);
	if (mem->coherent)
		dma_free_coherent(vr->dma_dev, mem->coherent, mem->vaddr, mem->dma[0]);
	else if (mem->page)
		put_page(mem->page);
	else
		vfree(mem->vaddr);
	if (mem->dma != &mem->one)
		kvfree(mem->dma);
	kfree(mem);
}

static int vrdma_mem_map(struct vrdma *vr, struct vrdma_mem *mem, u32 npages)
{
	struct page *page;
	dma_addr_t addr;

	mem->dma = &mem->one;
	if (npages > 1) {
		mem->dma = kvcalloc(npages, sizeof(*mem->dma), GFP_KERNEL);
		if (!mem->dma)
			return -ENOMEM;
	}
	for (; mem->npages < npages; mem->npages++) {
		if (mem->page)
			page = mem->page + mem->first + mem->npages;
		else
			page = vmalloc_to_page(mem->vaddr + (size_t)mem->npages * PAGE_SIZE);
		addr = dma_map_page(vr->dma_dev, page, 0, PAGE_SIZE, DMA_BIDIRECTIONAL);
		if (dma_mapping_error(vr->dma_dev, addr))
			return -ENOMEM;
		mem->dma[mem->npages] = addr;
	}
	return 0;
}

/* Zeroed pages for us and the device: rings of the kernel, shared pages, list pages. */
struct vrdma_mem *vrdma_mem_kernel(struct vrdma *vr, size_t length)
{
	struct vrdma_mem *mem = vrdma_mem_alloc();
	size_t npages = DIV_ROUND_UP(length, PAGE_SIZE);
	int ret = -ENOMEM;

	if (!mem)
		return ERR_PTR(ret);
	if (npages == 1) {
		/* A page of its own can be mapped into processes and outlive us there. */
		mem->page = alloc_page(GFP_KERNEL | __GFP_ZERO);
		mem->vaddr = mem->page ? page_address(mem->page) : NULL;
	} else {
		mem->vaddr = vzalloc(length);
	}
	if (mem->vaddr && npages <= U32_MAX)
		ret = vrdma_mem_map(vr, mem, npages);
	if (ret) {
		vrdma_mem_free(vr, mem);
		return ERR_PTR(ret);
	}
	return mem;
}

struct vrdma_mem *vrdma_mem_page(struct vrdma *vr)
{
	return vrdma_mem_kernel(vr, PAGE_SIZE);
}

/* Part of pages in one run, to which the caller keeps a reference of his own. */
struct vrdma_mem *vrdma_mem_part(struct vrdma *vr, struct page *page, u64 offset, u64 length)
{
	struct vrdma_mem *mem = vrdma_mem_alloc();
	int ret;

	if (!mem)
		return ERR_PTR(-ENOMEM);
	get_page(page);
	mem->page = page;
	mem->first = offset >> PAGE_SHIFT;
	mem->offset = offset_in_page(offset);
	ret = vrdma_mem_map(vr, mem, DIV_ROUND_UP_ULL(mem->offset + length, PAGE_SIZE));
	if (ret) {
		vrdma_mem_free(vr, mem);
		return ERR_PTR(ret);
	}
	return mem;
}

/* One run of bus addresses, from mem->dma[0] on. */
struct vrdma_mem *vrdma_mem_contiguous(struct vrdma *vr, size_t length)
{
	struct vrdma_mem *mem = vrdma_mem_alloc();

	if (!mem)
		return ERR_PTR(-ENOMEM);
	mem->dma = &mem->one;
	mem->vaddr = dma_alloc_coherent(vr->dma_dev, length, &mem->one, GFP_KERNEL);
	if (!mem->vaddr) {
		kfree(mem);
		return ERR_PTR(-ENOMEM);
	}
	mem->coherent = length;
	return mem;
}

void vrdma_mem_put(struct vrdma *vr, struct vrdma_mem *mem, bool device_is_done)
{
	if (IS_ERR_OR_NULL(mem))
		return;
	if (device_is_done) {
		vrdma_mem_free(vr, mem);
		return;
	}
	spin_lock(&vr->orphan_lock);
	if (list_empty(&vr->orphans))
		dev_warn(&vr->vdev->dev,
			 "memory that the device may still use is kept until it is reset\n");
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
		vrdma_mem_free(vr, mem);
		count++;
	}
	if (count)
		dev_info(&vr->vdev->dev, "%u pieces of memory were kept until the reset\n", count);
}

/* ---- Page lists ---- */

static u64 vrdma_mem_dma(const struct vrdma_mem *mem, size_t offset)
{
	return mem->dma[offset / PAGE_SIZE] + offset % PAGE_SIZE;
}

static __le64 *vrdma_list_page(struct vrdma_page_list *list, u32 n)
{
	return list->mem->vaddr + (size_t)n * VIRTIO_RDMA_PAGE_SIZE;
}

static u64 vrdma_list_page_dma(struct vrdma_page_list *list, u32 n)
{
	return vrdma_mem_dma(list->mem, (size_t)n * VIRTIO_RDMA_PAGE_SIZE);
}

static int vrdma_page_list_alloc(struct vrdma *vr, struct vrdma_page_list *list, u64 npages)
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
	list->mem = vrdma_mem_kernel(vr, total * VIRTIO_RDMA_PAGE_SIZE);
	return PTR_ERR_OR_ZERO(list->mem);
}

static void vrdma_page_list_add(struct vrdma_page_list *list, u64 addr)
{
	u32 i = list->filled++;

	if (list->mem)
		vrdma_list_page(list, i / VRDMA_ENTRIES)[i % VRDMA_ENTRIES] = cpu_to_le64(addr);
	else
		list->desc.addr = cpu_to_le64(addr);
}

/* Joins the leaves to a tree whose root is the last page. */
static void vrdma_page_list_link(struct vrdma_page_list *list)
{
	u32 first = 0, count = DIV_ROUND_UP(list->filled, VRDMA_ENTRIES), parents, i;

	if (!list->mem)
		return;
	while (count > 1) {
		parents = first + count;
		for (i = 0; i < count; i++)
			vrdma_list_page(list, parents + i / VRDMA_ENTRIES)[i % VRDMA_ENTRIES] =
				cpu_to_le64(vrdma_list_page_dma(list, first + i));
		first = parents;
		count = DIV_ROUND_UP(count, VRDMA_ENTRIES);
	}
	list->desc.addr = cpu_to_le64(vrdma_list_page_dma(list, first));
}

/* Behind an IOMMU only what was pinned is mapped, and no block may reach beyond it. */
static bool vrdma_block_is_there(struct vrdma *vr, u64 addr, unsigned long size)
{
	if (virtio_has_feature(vr->vdev, VIRTIO_F_ACCESS_PLATFORM))
		return false;
	return page_is_ram(addr >> PAGE_SHIFT) && page_is_ram((addr + size - 1) >> PAGE_SHIFT);
}

/*
 * The first and the last block may reach beyond the pinned memory. That harms nothing, as long as
 * they lie in guest memory as a whole: near its end, or near a hole, only the base page size is
 * safe.
 */
static unsigned long vrdma_umem_block_size(struct vrdma *vr, struct ib_umem *umem)
{
	unsigned long sizes = le64_to_cpu(vr->attr.page_size_cap) & GENMASK(30, 12);
	unsigned long size = ib_umem_find_best_pgsz(umem, sizes | SZ_4K, umem->address);
	struct ib_block_iter iter;
	u64 first = 0, last = 0;
	bool any = false;

	if (size <= SZ_4K || IS_ALIGNED(umem->address | umem->length, size))
		return size;
	rdma_umem_for_each_dma_block(umem, &iter, size) {
		last = rdma_block_iter_dma_address(&iter);
		if (!any)
			first = last;
		any = true;
	}
	if (any && vrdma_block_is_there(vr, first, size) && vrdma_block_is_there(vr, last, size))
		return size;
	return ib_umem_find_best_pgsz(umem, SZ_4K, umem->address);
}

static int vrdma_page_list_umem(struct vrdma *vr, struct vrdma_page_list *list,
				struct ib_umem *umem)
{
	unsigned long size = vrdma_umem_block_size(vr, umem);
	struct ib_block_iter iter;
	int ret;

	if (!size)
		return -EINVAL;
	ret = vrdma_page_list_alloc(vr, list, ib_umem_num_dma_blocks(umem, size));
	if (ret)
		return ret;
	list->desc.page_shift = ilog2(size);
	list->desc.offset = cpu_to_le32(umem->address & (size - 1));
	rdma_umem_for_each_dma_block(umem, &iter, size)
		vrdma_page_list_add(list, rdma_block_iter_dma_address(&iter));
	return 0;
}

static int vrdma_page_list_kernel(struct vrdma *vr, struct vrdma_page_list *list,
				  const struct vrdma_mem *mem)
{
	int ret = vrdma_page_list_alloc(vr, list, mem->npages);
	u32 i;

	if (ret)
		return ret;
	/* With larger base pages a page is several of the device's. */
	list->desc.page_shift = PAGE_SHIFT;
	list->desc.offset = cpu_to_le32(mem->offset);
	for (i = 0; i < mem->npages; i++)
		vrdma_page_list_add(list, mem->dma[i]);
	return 0;
}

int vrdma_page_list_build(struct vrdma *vr, struct vrdma_page_list *list, struct vrdma_mem *mem)
{
	int ret;

	memset(list, 0, sizeof(*list));
	if (mem->umem)
		ret = vrdma_page_list_umem(vr, list, mem->umem);
	else
		ret = vrdma_page_list_kernel(vr, list, mem);
	if (!ret && list->filled != le32_to_cpu(list->desc.npages))
		ret = -EFAULT;
	if (!ret)
		vrdma_page_list_link(list);
	return ret;
}

/*
 * The device reads list pages while it executes the command and never afterwards. Only when it
 * never answered they have to stay until the reset.
 */
void vrdma_page_list_free(struct vrdma *vr, struct vrdma_page_list *list)
{
	vrdma_mem_put(vr, list->mem, !vrdma_is_lost(vr));
	list->mem = NULL;
}
