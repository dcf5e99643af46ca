// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * How many descriptors this process has, those of the look included.
 */
#include <dirent.h>

static int descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int count = 0;

	while (dir && readdir(dir))
		count++;
	if (dir)
		closedir(dir);
	return count;
}
