#!/bin/sh
# usage: user.sh : a user proa (10001) without a password or a shell, and its directories
set -eu
root="${ROOT:-}"
echo 'proa:x:10001:' >> "$root/etc/group"
echo 'proa:x:10001:10001:proa:/home/proa:/usr/sbin/nologin' >> "$root/etc/passwd"
# ~/.cache/proa is a volume: it has to be the user's before it is mounted.
mkdir -p "$root/home/proa/.cache/proa" "$root/etc/proa" "$root/models"
chown -R 10001:10001 "$root/home/proa"
