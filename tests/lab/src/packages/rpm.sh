# In a Debian root with rpm, rpmlint and DKMS, /work with the sources: makes the RPM packages, looks
# into them, installs them, looks at what is there, and removes them. What RPM knows to be installed
# is nothing but these two, so dependencies are read, not resolved (--nodeps).
packaging=vhost-rdma/guest/packaging
sh $packaging/build-rpm.sh --rdma-core /work/rdma-core /work/rpms -- --nodeps
cd rpms
ls | sed 's/-[0-9].*-1[.]/ /' | sort > ../made
printf '%s\n' 'virtio-rdma src.rpm' 'virtio-rdma-dkms noarch.rpm' \
  "virtio-rdma-provider $(uname -m).rpm" | diff - ../made
cd ..
dkms=$(echo rpms/virtio-rdma-dkms-*.rpm)
provider=$(echo rpms/virtio-rdma-provider-*.rpm)

rpmlint --strict -c $packaging/rpm/rpmlint.toml rpms/*.rpm

# The sources are those of the tree, and the provider asks for its private ABI by itself.
at=/usr/src/virtio-rdma-$(rpm -qp --qf '%{VERSION}-%{RELEASE}' "$dkms")
{
  ls vhost-rdma/guest/kernel | grep -E '[.][ch]$|^Kbuild$|^Makefile$'
  echo dkms.conf
  echo include
  echo include/virtio_rdma_abi.h
  echo include/virtio_rdma_uapi.h
} | sort > wanted
rpm -qlp "$dkms" | sed -n "s|^$at/||p" | sort | diff wanted -
printf '%s\n' /etc/libibverbs.d/virtio_rdma.driver LIBDIR/libvirtio_rdma-rdmav34.so > wanted
rpm -qlp "$provider" | grep -v -e /licenses/ -e '/[.]build-id' |
  sed 's|.*/libibverbs/|LIBDIR/|' | sort | diff wanted -
rpm -qp --requires "$dkms" | grep -x 'dkms >= 3.0'
rpm -qp --requires "$provider" | grep -F 'libibverbs.so.1(IBVERBS_PRIVATE_34)'

# As a user would, and once more as an upgrade: the module must outlive the old package's end.
rpm -i --nodeps "$dkms" "$provider"
rpm -U --nodeps --replacepkgs "$dkms" "$provider"
rpm -V --nodeps virtio-rdma-dkms virtio-rdma-provider
set -- /lib/modules/*/updates/dkms/virtio_rdma.ko*
[ $# = 1 ]
abi=${1#/lib/modules/}
abi=${abi%%/*}
modinfo -F vermagic "$1" | grep "^$abi "
mkdir -p "modules/$abi"
cp "$1" "modules/$abi/"
library=$(rpm -ql virtio-rdma-provider | grep '/libvirtio_rdma-rdmav34[.]so$')
ldd "$library" > libraries
cat libraries
! grep -q 'not found' libraries
cp "$library" /etc/libibverbs.d/virtio_rdma.driver .

rpm -e --nodeps virtio-rdma-dkms virtio-rdma-provider
find / -xdev -path /work -prune -o -path /proc -prune -o -name '*virtio[_-]rdma*' -print > left
! grep . left
rm -rf rpms rdma-core left libraries made wanted
