package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// names are the programs of a release.
var names = []string{"ckptstore", "trainer"}

// machines are the processors by the names of Linux, which wheels and rpm use.
var machines = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// console is the package whose variables --version prints.
const console = "github.com/ckptstore/ckptstore/internal/console"

// bin returns the directory of the programs for a processor.
func (r *release) bin(arch string) string { return filepath.Join(r.work, "bin", arch) }

// programs builds the programs for every processor. ckptstore is static: it needs no C library. The
// trainer needs glibc, through which it loads NVML if the machine has a GPU; it resolves names and
// users as ckptstore does, without the C library.
func (r *release) programs(ctx context.Context) error {
	flags := fmt.Sprintf("-s -w -buildid= -X %[1]s.release=%[2]s -X %[1]s.commit=%[3]s -X %[1]s.date=%[4]s",
		console, r.version, r.commit, r.date.Format(time.RFC3339))
	for _, arch := range r.arches {
		if err := os.MkdirAll(r.bin(arch), 0o755); err != nil {
			return err
		}
		compiler, err := r.toolchain(ctx, arch)
		if err != nil {
			return err
		}
		for _, name := range names {
			// Flags of the environment would change the bytes.
			env := append(compiler, "GOFLAGS=", "GOWORK=off", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "CGO_ENABLED=0")
			if name == "trainer" {
				env = append(env, "CGO_ENABLED=1")
			}
			program := filepath.Join(r.bin(arch), name)
			// task build uses the same flags of the compiler: CI compiles these packages once.
			args := []string{"build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-tags", "netgo,osusergo", "-ldflags", flags, "-o", program, "./cmd/" + name}
			if _, err := commandOutput(ctx, r.root, env, "go", args...); err != nil {
				return err
			}
			if err := forget(program, nvmlLibrary); err != nil {
				return err
			}
		}
	}
	return nil
}

// wheels builds the pure wheel, and one for every processor with the programs and the native helper.
func (r *release) wheels(ctx context.Context) error {
	build := filepath.Join(r.root, "python", "build.py")
	if _, err := r.output(ctx, filepath.Join(r.root, "python"), r.python, "-m", "hatchling", "build", "-t", "wheel", "-d", r.out); err != nil {
		return err
	}
	for _, arch := range r.arches {
		folder := filepath.Join(r.work, "wheel", arch)
		if err := os.CopyFS(folder, os.DirFS(r.bin(arch))); err != nil {
			return err
		}
		for _, name := range names { // CopyFS leaves modes to the umask
			if err := os.Chmod(filepath.Join(folder, name), 0o755); err != nil {
				return err
			}
		}
		compiler, err := r.toolchain(ctx, arch)
		if err != nil {
			return err
		}
		if _, err := commandOutput(ctx, r.root, compiler, r.python, build, "--helper", folder); err != nil {
			return err
		}
		if err := os.Chmod(filepath.Join(folder, "libckptstore.so"), 0o755); err != nil {
			return err
		}
		if _, err := r.output(ctx, r.root, r.python, build, "--out", r.out, "--programs", folder, "--platform", libcTag+machines[arch]); err != nil {
			return err
		}
	}
	return nil
}
