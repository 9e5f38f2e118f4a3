//go:build testbed || outlive

package testbed_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// Two nodes on one disk. The second one loses its link to the first.
func Example() {
	ctx := context.Background()
	bed, err := testbed.New(testbed.Options{Seed: 1})
	check(err)
	defer func() { check(bed.Close()) }()
	dir, err := os.MkdirTemp("", "disk-")
	check(err)
	defer func() { check(os.RemoveAll(dir)) }()
	disk, err := netfs.NewServer(dir)
	check(err)
	defer func() { check(disk.Close()) }()

	disks := []testbed.Disk{{At: "/srv/store", Server: disk, Options: netfs.NFS()}}
	a, err := bed.Start(ctx, testbed.Config{Name: "a", Disks: disks})
	check(err)
	b, err := bed.Start(ctx, testbed.Config{Name: "b", Disks: disks})
	check(err)

	check(a.Command(ctx, "sh", "-c", "uname -n >/srv/store/f").Run())
	out, err := b.Command(ctx, "cat", "/srv/store/f").Output()
	check(err)
	fmt.Printf("b reads %s", out)

	bed.Switch().Cut("a", "b")
	_, err = b.Command(ctx, "timeout", "0.2", "bash", "-c", "exec 3<>/dev/tcp/a/7").Output()
	fmt.Println("b connects to a:", err)
	check(b.PowerOff())
	// Output:
	// b reads a
	// b connects to a: exit status 124
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
