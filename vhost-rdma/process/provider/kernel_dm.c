// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Device memory, as the guest's kernel driver has it (guest/kernel/dm.c): memory of this process
 * that is reached by copies and registered zero-based, bounded for each context. The guest's
 * provider has the rest (guest/provider/dm.c). It takes no session to have it, only to register it.
 */
#define VRDMA_KERNEL_ITSELF
#include "kernel.h"

#include "session.h"
#include "virtio_rdma.h"

#define PAGE ((size_t)4096)

/* A region of it. */
struct region {
	struct region *next;
	uint32_t lkey;
};

struct local_dm {
	struct local_dm *next;
	const struct ibv_context *context;
	uint32_t handle;
	uint8_t *base;
	size_t len;		/* as it was asked for */
	struct region *regions;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct local_dm *all;
static uint32_t last_handle;

/* With the lock. */
static struct local_dm **find(uint32_t handle)
{
	struct local_dm **at;

	for (at = &all; *at && (*at)->handle != handle; at = &(*at)->next)
		;
	return at;
}

static size_t taken(const struct ibv_context *context)
{
	const struct local_dm *dm;
	size_t len = 0;

	for (dm = all; dm; dm = dm->next)
		len += dm->context == context ? align(dm->len, PAGE) : 0;
	return len;
}

/* Where the provider wants the answer of a driver. */
static struct virtio_rdma_dm_resp *answer_in(struct ibv_command_buffer *link)
{
	struct ib_uverbs_attr *attr;

	for (attr = link->hdr.attrs; attr < link->next_attr; attr++) {
		if (attr->attr_id == VIRTIO_RDMA_ATTR_DM_ALLOC_RESP)
			return (void *)(uintptr_t)attr->data;
	}
	return NULL;
}

static struct local_dm *make(const struct ibv_context *context, size_t len)
{
	size_t pages = align(len, PAGE);
	struct local_dm *dm;

	pthread_mutex_lock(&lock);
	dm = taken(context) + pages <= VRDMA_DM_SIZE ? calloc(1, sizeof(*dm)) : NULL;
	if (!dm)
		goto out;
	dm->base = vrdma_pages_alloc(pages);
	if (!dm->base) {
		free(dm);
		dm = NULL;
		goto out;
	}
	dm->context = context;
	dm->len = len;
	do
		dm->handle = ++last_handle;
	while (*find(dm->handle));
	dm->next = all;
	all = dm;
out:
	pthread_mutex_unlock(&lock);
	return dm;
}

int vrdma_local_alloc_dm(struct ibv_context *context, const struct ibv_alloc_dm_attr *attr,
			 struct verbs_dm *vdm, struct ibv_command_buffer *link)
{
	struct virtio_rdma_dm_resp *resp = answer_in(link);
	struct local_dm *dm;

	if (!resp || !attr->length || attr->length > VRDMA_DM_SIZE || attr->log_align_req > 12)
		return EINVAL;
	dm = make(context, attr->length);
	if (!dm)
		return ENOMEM;
	resp->mmap = (uintptr_t)dm->base;
	resp->length = align(dm->len, PAGE);
	vdm->handle = dm->handle;
	vdm->dm.handle = dm->handle;
	vdm->dm.comp_mask = IBV_DM_MASK_HANDLE;
	vdm->dm.context = context;
	return 0;
}

/* The provider unmaps the pages, which gives them back (vrdma_local_munmap). */
int vrdma_local_free_dm(struct verbs_dm *vdm)
{
	struct local_dm **at, *dm;
	int ret = 0;

	pthread_mutex_lock(&lock);
	at = find(vdm->handle);
	dm = *at;
	if (!dm) {
		ret = ENOENT;
	} else if (dm->regions) {
		ret = EBUSY;
	} else {
		*at = dm->next;
		free(dm);
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

/* The pages of a part of it; NULL if it has no such part. */
static uint8_t *part(uint32_t handle, uint64_t offset, size_t length)
{
	struct local_dm *dm;
	uint8_t *base = NULL;

	pthread_mutex_lock(&lock);
	dm = *find(handle);
	if (dm && offset <= dm->len && length <= dm->len - offset)
		base = dm->base + offset;
	pthread_mutex_unlock(&lock);
	return base;
}

static int note(uint32_t handle, struct region *region)
{
	struct local_dm *dm;

	pthread_mutex_lock(&lock);
	dm = *find(handle);
	if (dm) {
		region->next = dm->regions;
		dm->regions = region;
	}
	pthread_mutex_unlock(&lock);
	return dm ? 0 : ENOENT;
}

int vrdma_local_reg_dm_mr(struct ibv_pd *pd, struct verbs_dm *vdm, uint64_t offset, size_t length,
			  unsigned int access, struct verbs_mr *vmr,
			  struct ibv_command_buffer *link)
{
	uint8_t *base = part(vdm->handle, offset, length);
	struct region *region;
	int ret;

	if (!base || !(access & IBV_ACCESS_ZERO_BASED))
		return EINVAL;
	region = calloc(1, sizeof(*region));
	if (!region)
		return ENOMEM;
	ret = vrdma_local_reg_mr(pd, base, length, 0, (int)access, vmr, NULL, 0, NULL, 0);
	if (ret) {
		free(region);
		return ret;
	}
	region->lkey = vmr->ibv_mr.lkey;
	ret = note(vdm->handle, region);
	if (ret) {
		free(region);
		vrdma_local_dereg_mr(vmr);
		return ret;
	}
	vmr->ibv_mr.length = length;
	vmr->ibv_mr.pd = pd;
	vmr->ibv_mr.addr = NULL;
	return 0;
}

/* A region is gone; most are of no device memory. */
void vrdma_dm_forget(const struct ibv_context *context, uint32_t lkey)
{
	struct region **at, *gone = NULL;
	struct local_dm *dm;

	pthread_mutex_lock(&lock);
	for (dm = all; dm && !gone; dm = dm->next) {
		if (dm->context != context)
			continue;
		for (at = &dm->regions; *at && (*at)->lkey != lkey; at = &(*at)->next)
			;
		gone = *at;
		if (gone)
			*at = gone->next;
	}
	pthread_mutex_unlock(&lock);
	free(gone);
}

static void free_one(struct local_dm *dm)
{
	struct region *region;

	while ((region = dm->regions)) {
		dm->regions = region->next;
		free(region);
	}
	free(dm);
}

/* A context ends. Pages stay with whoever still has a pointer to them. */
void vrdma_dm_end(const struct ibv_context *context)
{
	struct local_dm **at = &all, *dm;

	pthread_mutex_lock(&lock);
	while ((dm = *at)) {
		if (dm->context == context) {
			*at = dm->next;
			free_one(dm);
		} else {
			at = &dm->next;
		}
	}
	pthread_mutex_unlock(&lock);
}

void vrdma_dm_before_fork(void)
{
	pthread_mutex_lock(&lock);
}

/* The pages of what there was are the parent's alone. */
void vrdma_dm_after_fork(int in_child)
{
	if (in_child)
		all = NULL;
	pthread_mutex_unlock(&lock);
}

/* A context here is one process's: there is nothing that another could import. */
int vrdma_local_execute_ioctl(struct ibv_context *context, struct ibv_command_buffer *cmd)
{
	errno = EOPNOTSUPP;
	return EOPNOTSUPP;
}
