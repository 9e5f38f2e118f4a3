package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// libc is the oldest C library on which the trainer and the helper of a release run, glibc 2.17 of
// 2012, by the name of zig and by the tag of a wheel.
const (
	libc    = "gnu.2.17"
	libcTag = "manylinux_2_17_"
)

// nvmlLibrary is what the stand-in for NVML has as its name.
const nvmlLibrary = "libnvidia-ml.so.1"

// toolchain returns the environment of a C compiler for a processor: zig, which
// release/requirements.txt pins, and which brings the headers and symbols of every glibc.
//
// The trainer loads NVML when it runs and leaves NVML's functions undefined when it is linked, for
// which zig's linker has no option. So it is linked with a stand-in, a library with functions of those
// names, and [forget] removes the stand-in from the libraries that it needs. The functions
// are looked up at their first call.
func (r *release) toolchain(ctx context.Context, arch string) ([]string, error) {
	env := []string{"CGO_CFLAGS=-O2", "CGO_LDFLAGS=-O2 -s", "ZIG_LOCAL_CACHE_DIR=" + filepath.Join(r.work, "zig")}
	dir := filepath.Join(r.work, "cc", arch)
	cc := filepath.Join(dir, "cc")
	standIn := filepath.Join(dir, nvmlLibrary)
	if _, err := os.Stat(standIn); err == nil {
		return append(env, "CC="+cc), nil
	}
	source, err := r.standIn(ctx)
	if err != nil {
		return nil, err
	}
	script := fmt.Sprintf(`#!/bin/sh
for a; do
	shift
	case $a in
	-Wl,--unresolved-symbols=*) set -- "$@" '%s' -Wl,-z,lazy ;;
	*) set -- "$@" "$a" ;;
	esac
done
exec '%s' -m ziglang cc -target %s-linux-%s "$@"
`, standIn, r.python, machines[arch], libc)
	err = errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(cc, []byte(script), 0o755), os.WriteFile(standIn+".c", source, 0o644))
	if err != nil {
		return nil, err
	}
	_, err = commandOutput(ctx, dir, env, cc, "-shared", "-nostdlib", "-Wl,-soname,"+nvmlLibrary, "-o", standIn, standIn+".c")
	return append(env, "CC="+cc), err
}

// standIn returns the C source of the stand-in: a function for each that the header of NVML declares.
func (r *release) standIn(ctx context.Context) ([]byte, error) {
	const module = "github.com/NVIDIA/go-nvml"
	if _, err := r.output(ctx, r.root, "go", "mod", "download", module); err != nil { // list downloads nothing
		return nil, err
	}
	dir, err := r.output(ctx, r.root, "go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return nil, err
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(dir), "pkg", "nvml", "nvml.h"))
	if err != nil {
		return nil, err
	}
	var functions []string
	for _, found := range regexp.MustCompile(`\bDECLDIR\b[^;(]*\b(nvml\w+)\s*\(`).FindAllSubmatch(header, -1) {
		functions = append(functions, string(found[1]))
	}
	slices.Sort(functions)
	var source bytes.Buffer
	for _, f := range slices.Compact(functions) {
		fmt.Fprintf(&source, "void %s(void) {}\n", f)
	}
	return source.Bytes(), nil
}

// forget removes a library from those that a program of 64 bits needs. A program that does not need it stays as
// it is.
func forget(path, library string) (err error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	program, err := elf.NewFile(file)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	needed, err := program.ImportedLibraries()
	at := slices.Index(needed, library)
	section := program.SectionByType(elf.SHT_DYNAMIC)
	if err != nil || at < 0 || section == nil {
		return err
	}
	entries, err := section.Data()
	if err != nil {
		return err
	}
	const size = 16 // of an entry: a tag, a value
	for i, seen := 0, 0; i+size <= len(entries); i += size {
		if elf.DynTag(program.ByteOrder.Uint64(entries[i:])) != elf.DT_NEEDED {
			continue
		}
		if seen == at {
			kept := append(slices.Clone(entries[:i]), entries[i+size:]...)
			kept = binary.LittleEndian.AppendUint64(kept, uint64(elf.DT_NULL))
			kept = binary.LittleEndian.AppendUint64(kept, 0)
			_, err = file.WriteAt(kept, int64(section.Offset)) //nolint:gosec // a place in a file that was read
			return err
		}
		seen++
	}
	return fmt.Errorf("%s: no entry names %s", path, library)
}
