// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * vrdma-vfio: opens a PCI function as a VMM does before it gives it to its guest, and maps a page
 * for its DMA.
 *
 * usage: vrdma-vfio GROUP ADDRESS        e.g. vrdma-vfio 7 0000:41:10.0
 *
 * Container, group, IOMMU type 1, one mapping, the device's descriptor and its configuration space:
 * every step by the kernel's interface (Documentation/driver-api/vfio.rst), so that what a pod may
 * not do fails here by name. Exit status 0 only if all was done.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096
#define IOVA 0x100000

static int fails(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	return 1;
}

int main(int argc, char **argv)
{
	struct vfio_group_status status = { .argsz = sizeof(status) };
	struct vfio_iommu_type1_dma_map map = { .argsz = sizeof(map) };
	struct vfio_region_info config = { .argsz = sizeof(config) };
	uint16_t id[2];
	char path[64];
	void *page;
	int container, group, device;

	if (argc != 3) {
		fprintf(stderr, "usage: vrdma-vfio GROUP ADDRESS\n");
		return 2;
	}
	container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
	if (container < 0)
		return fails("/dev/vfio/vfio");
	if (ioctl(container, VFIO_GET_API_VERSION) != VFIO_API_VERSION)
		return fails("VFIO_GET_API_VERSION");
	if (!ioctl(container, VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU))
		return fails("VFIO_CHECK_EXTENSION");
	snprintf(path, sizeof(path), "/dev/vfio/%s", argv[1]);
	group = open(path, O_RDWR | O_CLOEXEC);
	if (group < 0)
		return fails(path);
	if (ioctl(group, VFIO_GROUP_GET_STATUS, &status))
		return fails("VFIO_GROUP_GET_STATUS");
	if (!(status.flags & VFIO_GROUP_FLAGS_VIABLE)) {
		fprintf(stderr, "group %s is not viable: another driver has a function of it\n",
			argv[1]);
		return 1;
	}
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container))
		return fails("VFIO_GROUP_SET_CONTAINER");
	if (ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU))
		return fails("VFIO_SET_IOMMU");
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page == MAP_FAILED)
		return fails("mmap");
	map.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	map.vaddr = (uintptr_t)page;
	map.iova = IOVA;
	map.size = PAGE;
	if (ioctl(container, VFIO_IOMMU_MAP_DMA, &map))
		return fails("VFIO_IOMMU_MAP_DMA");
	device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, argv[2]);
	if (device < 0)
		return fails("VFIO_GROUP_GET_DEVICE_FD");
	config.index = VFIO_PCI_CONFIG_REGION_INDEX;
	if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &config))
		return fails("VFIO_DEVICE_GET_REGION_INFO");
	if (pread(device, id, sizeof(id), (off_t)config.offset) != sizeof(id))
		return fails("configuration space");
	printf("%s is %04x:%04x, a page is mapped for its DMA\n", argv[2], id[0], id[1]);
	return 0;
}
