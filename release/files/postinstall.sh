#!/bin/sh
set -e
if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers /usr/lib/sysusers.d/ckptstore.conf
elif ! getent passwd ckptstore >/dev/null; then
	getent group ckptstore >/dev/null || groupadd --system ckptstore
	useradd --system --gid ckptstore --home-dir /var/lib/ckptstore --no-create-home --shell /usr/sbin/nologin ckptstore
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart ckptstore.service
fi
