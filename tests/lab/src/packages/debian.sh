# In a root with DKMS and the headers of one or several kernels, /work with the sources: makes the
# Debian packages, installs them as a user would, looks at what is there, and removes them.
# $PROVIDER: the provider's package too, of the rdma-core in /work/rdma-core.
packaging=vhost-rdma/guest/packaging
case "$PROVIDER" in
yes) sh $packaging/build-deb.sh --rdma-core /work/rdma-core /work/debs;;
no) sh $packaging/build-deb.sh /work/debs;;
esac
dpkg -i debs/*.deb
dpkg -V virtio-rdma-dkms

kernels=0
for build in /lib/modules/*/build; do
  [ -d "$build/" ] || continue
  abi=${build%/build}
  abi=${abi##*/}
  set -- /lib/modules/"$abi"/updates/dkms/virtio_rdma.ko*
  modinfo -F vermagic "$1" | grep "^$abi "
  modinfo -F alias "$1" | grep virtio:
  mkdir -p "modules/$abi"
  cp "$1" "modules/$abi/"
  kernels=$((kernels + 1))
done
[ $kernels = "$KERNELS" ]

if [ "$PROVIDER" = yes ]; then
  dpkg -V virtio-rdma-provider
  library=$(dpkg -L virtio-rdma-provider | grep '/libvirtio_rdma-rdmav34[.]so$')
  # Beside the distribution's own providers, linked with what is there.
  [ -e "${library%/*}/librxe-rdmav34.so" ]
  ldd "$library" > libraries
  cat libraries
  ! grep -q 'not found' libraries
  cp "$library" /etc/libibverbs.d/virtio_rdma.driver .
fi

dpkg -P $(dpkg-query -W -f '${Package}\n' 'virtio-rdma-*')
find / -xdev -path /work -prune -o -path /proc -prune -o -name '*virtio[_-]rdma*' -print > left
! grep . left
rm -rf debs rdma-core left libraries
echo "$KERNELS" kernels
