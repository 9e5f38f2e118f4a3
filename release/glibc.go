package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/blakesmith/ar"
	"github.com/ulikunitz/xz"
)

// A base is the package of Debian with the C library of an image. The trainer needs that library to
// load NVML, which the container runtime mounts into a container that has a GPU.
type base struct {
	version string // of the package
	file    string // below the pool of an archive
	digest  string // SHA-256
}

// glibc is the base of each processor's image, of Debian 13. A newer one has another version and
// digests: `apt-cache show libc6` on Debian 13 prints them.
var glibc = map[string]base{
	"amd64": {"2.41-12+deb13u5", "main/g/glibc/libc6_2.41-12+deb13u5_amd64.deb", "b59b0625cd1a791375d40dab23a4d5d3d0641e3d0a773501becdc3725b7f99cf"},
	"arm64": {"2.41-12+deb13u5", "main/g/glibc/libc6_2.41-12+deb13u5_arm64.deb", "0966fc3da1a26cc57647c68b5736f791b6e7eb498173a7993f63b6c89b4ed4f5"},
}

// pools are archives of Debian: the current one, and the archive of what that has dropped.
var pools = []string{"http://deb.debian.org/debian/pool/", "https://snapshot.debian.org/archive/debian/20261121T000000Z/pool/"}

// libraries are the files of the base that an image has, and loaders that of each processor, of which
// it has one. NVML and the trainer need no others.
var (
	libraries = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "copyright"}
	loaders   = []string{"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
)

// fetchLimit bounds the download of a base, in bytes and in time.
const (
	fetchLimit   = 64 << 20
	fetchTimeout = 2 * time.Minute
)

// fetch returns a base, whose digest it has checked.
func (b base) fetch(ctx context.Context, pools []string) ([]byte, error) {
	var problems []error
	for _, pool := range pools {
		data, err := get(ctx, pool+b.file)
		if sum := sha256.Sum256(data); err == nil && hex.EncodeToString(sum[:]) != b.digest {
			err = fmt.Errorf("%s: its SHA-256 is %x, not %s", pool+b.file, sum, b.digest)
		}
		if err == nil {
			return data, nil
		}
		problems = append(problems, err)
	}
	return nil, fmt.Errorf("no archive has the C library of the image; release/glibc.go names it: %w", errors.Join(problems...))
}

func get(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, reply.Status)
	}
	data, err := io.ReadAll(io.LimitReader(reply.Body, fetchLimit+1))
	if err == nil && len(data) > fetchLimit {
		err = fmt.Errorf("%s: more than %d bytes", url, fetchLimit)
	}
	return data, err
}

// layer returns the layer with the libraries and the licence of a package, as a tar file. Its
// directories of programs and libraries lie in /usr, with the names of old below /.
func (b base) layer(data []byte, at time.Time) ([]byte, error) {
	members := ar.NewReader(bytes.NewReader(data))
	for {
		h, err := members.Next()
		if err != nil {
			return nil, fmt.Errorf("%s has no data.tar.xz: %w", b.file, err)
		}
		if strings.TrimSuffix(h.Name, "/") == "data.tar.xz" {
			break
		}
	}
	plain, err := xz.NewReader(members)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, name := range []string{"lib", "lib64"} {
		err := w.WriteHeader(&tar.Header{Name: name, Linkname: "usr/" + name, Typeflag: tar.TypeSymlink, Mode: 0o777, ModTime: at, Format: tar.FormatPAX})
		if err != nil {
			return nil, err
		}
	}
	r, found, made := tar.NewReader(plain), map[string]bool{}, map[string]bool{}
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", b.file, err)
		}
		name := path.Clean(h.Name)
		file := path.Base(name)
		if h.Typeflag == tar.TypeDir || !slices.Contains(libraries, file) && !slices.Contains(loaders, file) {
			continue
		}
		found[file] = true
		if err := parents(w, path.Dir(name), made, at); err != nil {
			return nil, err
		}
		kept := &tar.Header{Name: name, Linkname: h.Linkname, Typeflag: h.Typeflag, Mode: h.Mode, Size: h.Size, ModTime: at, Format: tar.FormatPAX}
		if err := w.WriteHeader(kept); err != nil {
			return nil, err
		}
		if _, err := io.Copy(w, r); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", b.file, name, err)
		}
	}
	missing := slices.DeleteFunc(slices.Clone(libraries), func(file string) bool { return found[file] })
	if !slices.ContainsFunc(loaders, func(file string) bool { return found[file] }) {
		missing = append(missing, "a loader")
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%s has no %s", b.file, strings.Join(missing, ", "))
	}
	err = w.Close()
	return out.Bytes(), err
}

// parents adds a directory to a layer, and those above it, unless they were added.
func parents(w *tar.Writer, name string, made map[string]bool, at time.Time) error {
	if name == "." || made[name] {
		return nil
	}
	if err := parents(w, path.Dir(name), made, at); err != nil {
		return err
	}
	made[name] = true
	return w.WriteHeader(&tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: 0o755, ModTime: at, Format: tar.FormatPAX})
}
