package store

import (
	"strings"
	"testing"
)

func TestPrivateGroup(t *testing.T) {
	t.Parallel()
	const passwd = "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbob:x:1001:1001::/home/bob:/bin/sh\n" +
		"cat:x:1002:100::/home/cat:/bin/sh\ndan:x:1003:1003::/:/bin/sh\neve:x:1004:1003::/:/bin/sh\nfay:x:1005:1005::/:/bin/sh\n"
	const group = "root:x:0:\nann:x:1000:\nbob:x:1001:bob,ann\nusers:x:100:\ndan:x:1003:dan\nteam:x:1005:\n"
	for what, c := range map[string]struct {
		uid, gid int
		want     bool
	}{
		"made with the user":                    {1000, 1000, true},
		"of another user":                       {1001, 1000, false},
		"with another member":                   {1001, 1001, false},
		"of all users":                          {1002, 100, false},
		"the primary group of another user too": {1003, 1003, false},
		"with another name":                     {1005, 1005, false},
		"not in the file":                       {1000, 4242, false},
		"of a user who is not in the file":      {4242, 1000, false},
	} {
		if got := privateIn(c.uid, c.gid, strings.NewReader(passwd), strings.NewReader(group)); got != c.want {
			t.Errorf("a group %s: private is %v", what, got)
		}
	}
	if privateIn(1000, 1000, strings.NewReader(passwd), strings.NewReader(group+"other:x:1000:eve\n")) {
		t.Error("a second group with this number has another member")
	}
}
