#!/bin/sh
# Two containers that do RDMA with each other, each with a NIC of its own: on a CI runner, or any
# machine without RDMA hardware and without a kernel module for it.
#
#     vhost-rdma run --nics 2 -- two-containers.sh IMAGE "SERVER" "CLIENT"
#
# IMAGE is any image with the two programs in it; nothing of ours has to be there. SERVER is started
# first; in CLIENT the word SERVER_ADDRESS stands for the server's address on the containers'
# network, and NIC_ADDRESS for that of its NIC, which rdma_cm connects to. The end is the client's.
# For example:
#
#     vhost-rdma run --nics 2 -- two-containers.sh my-tests \
#         "ib_write_bw -F" "ib_write_bw -F SERVER_ADDRESS"
#     vhost-rdma run --nics 2 -- two-containers.sh my-tests \
#         "rping -s -C 10" "rping -c -a NIC_ADDRESS -C 10 -v"
#
# CONTAINERS says which engine: podman or docker, whichever is there. CONTAINER_OPTIONS go to both
# containers, ENGINE_OPTIONS to the engine. A container needs three things, all of them seen below:
# the NIC's socket, the libraries, and their place in the environment. The first two are where "run"
# says in VHOST_RDMA_DEVICES and VHOST_RDMA_LIBRARIES.
set -eu

[ $# -eq 3 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
image=$1 serves=$2 asks=$3
[ -n "${VHOST_RDMA_DEVICES:-}" ] || {
	echo "$0: start me with \"vhost-rdma run --nics 2 --\"" >&2
	exit 2
}
engine=${CONTAINERS:-$(command -v podman || command -v docker)} || {
	echo "$0: neither podman nor docker is on the PATH" >&2
	exit 1
}
case $VHOST_RDMA_DEVICES in
*:*) ;;
*)
	echo "$0: one NIC is not enough for two containers:" \
		"start me with \"vhost-rdma run --nics 2 --\"" >&2
	exit 2
	;;
esac
[ -f "${VHOST_RDMA_LIBRARIES:-}/libibverbs.so.1" ] || {
	echo "$0: VHOST_RDMA_LIBRARIES does not name the libraries:" \
		"start me with \"vhost-rdma run --nics 2 --\"" >&2
	exit 2
}
first=${VHOST_RDMA_DEVICES%%:*}
second=${VHOST_RDMA_DEVICES#*:}
second=${second%%:*}
addresses=${VHOST_RDMA_ADDRESSES:-}
nic=${addresses%% *}
server=vhost-rdma-$$

# A container with the NIC of this socket.
container() { # SOCKET OPTION... IMAGE COMMAND...
	socket=$1
	shift
	lib=/run/vhost-rdma/lib
	preload=$lib/libvhost_rdma_heap.so:$lib/libvhost_rdma_files.so
	# shellcheck disable=SC2086 # words are meant
	"$engine" ${ENGINE_OPTIONS:-} run ${CONTAINER_OPTIONS:-} \
		-v "$socket:/run/vhost-rdma/process/nic" \
		-v "$VHOST_RDMA_LIBRARIES:/run/vhost-rdma/lib:ro" \
		-e LD_LIBRARY_PATH=/run/vhost-rdma/lib \
		-e "LD_PRELOAD=$preload" \
		-e "VHOST_RDMA_SHARED_HEAP=${VHOST_RDMA_SHARED_HEAP:-1}" \
		"$@"
}

# The server's stays until the end, for what it has said.
trap '"$engine" rm -f "$server" > /dev/null 2>&1 || true' EXIT
# shellcheck disable=SC2086
container "$first" -d --name "$server" $image sh -c "exec $serves" > /dev/null
# That of its first network that gives one; Docker 29 has it nowhere else. What a network without
# addresses says is passed over.
networks='{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}'
address=
for word in $("$engine" inspect -f "$networks" "$server"); do
	case $word in
	*[!0-9.]*) ;;
	*) address=${address:-$word} ;;
	esac
done
asks=$(printf %s "$asks" | sed "s/SERVER_ADDRESS/${address:-127.0.0.1}/g; s/NIC_ADDRESS/$nic/g")
# The server is there when it answers.
for _ in 1 2 3 4 5 6 7 8 9; do
	sleep 0.5
	# shellcheck disable=SC2086
	if container "$second" --rm $image sh -c "$asks"; then exit 0; fi
	[ "$("$engine" inspect -f '{{.State.Running}}' "$server")" = true ] || break
done
echo "$0: the client found no server; the server said:" >&2
"$engine" logs "$server" >&2 || true
exit 1
