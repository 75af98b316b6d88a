# Carry out a Containerfile's RUN instructions as root, over a copy-on-write view of this machine's files, and then its
# command as its user. Run by test_container.py in a mount namespace of its own, with what it needs in variables.
set -eu
mount -t tmpfs tmpfs "$SCRATCH"
mkdir "$SCRATCH/upper" "$SCRATCH/work" "$SCRATCH/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$SCRATCH/upper,workdir=$SCRATCH/work" "$SCRATCH/root"
cd "$SCRATCH/root"
for directory in proc dev sys; do mount --rbind "/$directory" "$directory"; done
mkdir dist
mount --bind "$DIST" dist
chmod o+x root  # where the interpreter may lie
chroot . "$PYTHON" -m venv /opt/python >&2  # stands for that of the base image
echo "$RUN" >run.sh
PATH="/opt/python/bin:$PATH" chroot . sh -eu /run.sh >&2
umount dist
export PATH="/opt/python/bin:$PATH" HOME="$HOME_OF_USER"
exec chroot --userspec "$USER_ID" . sh -euc "cd $WORKDIR; $COMMAND"
