// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Memory that is shared with the device: rings and doorbell pages.
 *
 * Rings are pages of this process that the kernel driver pins, from mmap() or from the allocator of
 * a parent domain. They are kept out of forked children: a child that wrote to a copy-on-write page
 * would leave the parent with a page that the device does not see.
 */
#include <sys/mman.h>

#include "virtio_rdma.h"

static uint64_t resource_type(const struct vrdma_buf *buf)
{
	return (uint64_t)VIRTIO_RDMA_DRIVER_ID << 32 | buf->ring;
}

static void domain_free(struct vrdma_buf *buf)
{
	struct vrdma_pd *domain = buf->domain;

	domain->free(&domain->pd, domain->pd_context, buf->addr, resource_type(buf));
	atomic_fetch_sub(&domain->refcount, 1);
}

/* From the allocator of a parent domain, unless that leaves it to us. */
static int domain_alloc(struct vrdma_context *ctx, struct vrdma_pd *domain, struct vrdma_buf *buf)
{
	void *addr = domain->alloc(&domain->pd, domain->pd_context, buf->len, ctx->page_size,
				   resource_type(buf));

	if (addr == IBV_ALLOCATOR_USE_DEFAULT)
		return 0;
	if (!addr)
		return ENOMEM;
	buf->addr = addr;
	buf->domain = domain;
	atomic_fetch_add(&domain->refcount, 1);
	if ((uintptr_t)addr & (ctx->page_size - 1)) {
		domain_free(buf);
		return EINVAL;
	}
	memset(addr, 0, buf->len);
	return 0;
}

static void buf_release(struct vrdma_buf *buf)
{
	if (buf->domain)
		domain_free(buf);
	else
		munmap(buf->addr, buf->len);
	memset(buf, 0, sizeof(*buf));
}

/* `pd` may be NULL: then the memory is ours. */
int vrdma_buf_alloc(struct vrdma_context *ctx, struct ibv_pd *pd, enum vrdma_ring ring,
		    struct vrdma_buf *buf, size_t len)
{
	int ret;

	memset(buf, 0, sizeof(*buf));
	buf->len = align(len, ctx->page_size);
	buf->ring = ring;
	if (pd && to_vpd(pd)->alloc) {
		ret = domain_alloc(ctx, to_vpd(pd), buf);
		if (ret) {
			memset(buf, 0, sizeof(*buf));
			return ret;
		}
	}
	if (!buf->addr) {
		buf->addr = mmap(NULL, buf->len, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (buf->addr == MAP_FAILED) {
			buf->addr = NULL;
			return ENOMEM;
		}
	}
	ret = ibv_dontfork_range(buf->addr, buf->len);
	if (ret)
		buf_release(buf);
	return ret;
}

void vrdma_buf_free(struct vrdma_buf *buf)
{
	if (!buf->addr)
		return;
	ibv_dofork_range(buf->addr, buf->len);
	buf_release(buf);
}

/* 0 where an entry of that size is not possible. */
uint8_t vrdma_log2_stride(size_t bytes, uint8_t min_log2)
{
	uint8_t shift = min_log2;

	while (shift <= VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE && ((size_t)1 << shift) < bytes)
		shift++;
	return shift > VIRTIO_RDMA_WQE_MAX_LOG2_STRIDE ? 0 : shift;
}

size_t vrdma_ctrl_offset(uint32_t entries, uint8_t log2_stride)
{
	return align((size_t)entries << log2_stride, VIRTIO_RDMA_RING_CTRL_ALIGN);
}

/* Chooses ring size and stride; allocates nothing. */
int vrdma_wq_layout(struct vrdma_wq *wq, uint32_t max_wr, size_t wqe_size, uint8_t min_log2)
{
	uint64_t entries = roundup_pow_of_two(max_wr);

	wq->log2_stride = vrdma_log2_stride(wqe_size, min_log2);
	if (!max_wr || entries > UINT32_MAX || !wq->log2_stride)
		return EINVAL;
	wq->mask = (uint32_t)entries - 1;
	return 0;
}

void *vrdma_map_db_page(struct vrdma_context *ctx, uint32_t number, uint64_t offset)
{
	struct vrdma_db_page *pages;
	void *map = NULL;
	unsigned int i;

	pthread_mutex_lock(&ctx->db_mutex);
	for (i = 0; i < ctx->num_db_pages; i++) {
		if (ctx->db_pages[i].number == number) {
			map = ctx->db_pages[i].map;
			goto out;
		}
	}
	pages = realloc(ctx->db_pages, (ctx->num_db_pages + 1) * sizeof(*pages));
	if (!pages)
		goto out;
	ctx->db_pages = pages;
	map = mmap(NULL, ctx->page_size, PROT_READ | PROT_WRITE, MAP_SHARED,
		   ctx->vctx.context.cmd_fd, (off_t)offset);
	if (map == MAP_FAILED) {
		map = NULL;
		goto out;
	}
	pages[ctx->num_db_pages].number = number;
	pages[ctx->num_db_pages].map = map;
	ctx->num_db_pages++;
out:
	pthread_mutex_unlock(&ctx->db_mutex);
	return map;
}

int vrdma_wq_bind_doorbell(struct vrdma_context *ctx, struct vrdma_wq *wq, uint32_t db,
			   uint64_t db_mmap)
{
	uint32_t slot = db & ((1u << VIRTIO_RDMA_DB_PAGE_SHIFT) - 1);
	uint8_t *page;

	if (db == VIRTIO_RDMA_DB_NONE || slot >= VIRTIO_RDMA_DB_SLOTS)
		return EIO;
	page = vrdma_map_db_page(ctx, db >> VIRTIO_RDMA_DB_PAGE_SHIFT, db_mmap);
	if (!page)
		return ENOMEM;
	wq->db_index = (uint32_t *)(page + VIRTIO_RDMA_DB_INDEX) + slot;
	wq->db_summary = page + VIRTIO_RDMA_DB_SUMMARY + slot / VIRTIO_RDMA_DB_GROUP_SLOTS;
	return 0;
}
