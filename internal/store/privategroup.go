package store

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
)

// privateGroup reports whether a group has this process's user as its only member:
// the group that Debian, Fedora and others make with each user, so that a umask of
// 002 shares nothing. It must be in /etc/group, with the user's name and without
// other members, and be the primary group of no other user in /etc/passwd. Groups
// that come from elsewhere are not private. Nor is group 0: container platforms start
// users that no file lists as its members.
func privateGroup(gid int) bool {
	if gid == 0 {
		return false
	}
	passwd, err := os.Open("/etc/passwd")
	if err != nil {
		return false
	}
	defer passwd.Close()
	group, err := os.Open("/etc/group")
	if err != nil {
		return false
	}
	defer group.Close()
	return privateIn(os.Geteuid(), gid, passwd, group)
}

// privateIn reads what passwd(5) and group(5) say.
func privateIn(uid, gid int, passwd, group io.Reader) bool {
	me, others := "", false
	in := bufio.NewScanner(passwd)
	for in.Scan() {
		f := strings.Split(in.Text(), ":") // name:x:uid:gid:…
		if len(f) < 4 || f[3] != strconv.Itoa(gid) {
			continue
		}
		if f[2] == strconv.Itoa(uid) {
			me = f[0]
		} else {
			others = true
		}
	}
	if in.Err() != nil || me == "" || others {
		return false
	}
	private := false
	in = bufio.NewScanner(group)
	for in.Scan() {
		f := strings.Split(in.Text(), ":") // name:x:gid:members
		if len(f) == 4 && f[2] == strconv.Itoa(gid) {
			if private = f[0] == me && (f[3] == "" || f[3] == me); !private {
				return false
			}
		}
	}
	return in.Err() == nil && private
}
