package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user is the user and group of the image's processes, unless a container names others.
const user = 65532

// image writes an image layout of the OCI as a tar file, with an image for every
// processor. An image has a C library and the programs, and nothing else: no shell.
func (r *release) image(ctx context.Context) error {
	name := "docker.io/ckptstore/ckptstore:" + r.version
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range r.arches {
		img, err := r.imageOf(ctx, arch)
		if err != nil {
			return fmt.Errorf("image for %s: %w", arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: arch},
		}})
	}
	// A name belongs to the index of all processors, of which a reader takes its own.
	named := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{
		Annotations: map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": r.version},
	}})
	folder := filepath.Join(r.work, "image")
	if _, err := layout.Write(folder, named); err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(r.out, "ckptstore-"+r.version+"-image.tar"))
	if err != nil {
		return err
	}
	return errors.Join(archive(out, os.DirFS(folder), time.Unix(0, 0)), out.Close())
}

// imageOf returns the image for a processor.
func (r *release) imageOf(ctx context.Context, arch string) (v1.Image, error) {
	b := r.glibc[arch]
	data, err := b.fetch(ctx, r.pools)
	if err != nil {
		return nil, err
	}
	library, err := b.layer(data, r.date)
	if err != nil {
		return nil, err
	}
	own, err := r.layer(arch)
	if err != nil {
		return nil, err
	}
	created := v1.Time{Time: r.date}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, part := range []struct {
		by   string
		data []byte
	}{{"libc6 " + b.version + " of Debian", library}, {"task release", own}} {
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(part.data)), nil }, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, err
		}
		img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: created, CreatedBy: part.by}})
		if err != nil {
			return nil, err
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, created
	config.Config = v1.Config{
		User: fmt.Sprintf("%d:%d", user, user), WorkingDir: "/", Entrypoint: []string{"/usr/bin/trainer"},
		// A runtime for GPUs mounts NVML, and nothing more, where a container is given GPUs.
		Env: []string{"PATH=/usr/bin:/bin", "HOME=/tmp", "NVIDIA_DRIVER_CAPABILITIES=utility"},
		Labels: map[string]string{
			"org.opencontainers.image.version": r.version, "org.opencontainers.image.revision": r.commit,
			"org.opencontainers.image.licenses": "Apache-2.0", "org.opencontainers.image.title": "ckptstore",
		},
	}
	return mutate.ConfigFile(img, config)
}

// layer returns the layer of the programs as a tar file.
func (r *release) layer(arch string) ([]byte, error) {
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	add := func(name string, kind byte, mode int64, content []byte) error {
		h := &tar.Header{Name: name, Typeflag: kind, Mode: mode, Size: int64(len(content)), ModTime: r.date, Format: tar.FormatPAX}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(content)
		return err
	}
	err := add("etc/", tar.TypeDir, 0o755, nil)
	err = errors.Join(err, add("etc/passwd", tar.TypeReg, 0o644, fmt.Appendf(nil, "root:x:0:0::/:/\nckptstore:x:%d:%d::/tmp:/\n", user, user)))
	err = errors.Join(err, add("tmp/", tar.TypeDir, 0o1777, nil), add("usr/", tar.TypeDir, 0o755, nil), add("usr/bin/", tar.TypeDir, 0o755, nil))
	for _, name := range names {
		program, rerr := os.ReadFile(filepath.Join(r.bin(arch), name))
		err = errors.Join(err, rerr, add("usr/bin/"+name, tar.TypeReg, 0o755, program))
	}
	err = errors.Join(err, w.Close()) // it writes the end of the archive
	return data.Bytes(), err
}

// archive writes the files of a tree as a tar file, in the order of their names.
func archive(out io.Writer, tree fs.FS, at time.Time) error {
	w := tar.NewWriter(out)
	err := fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if entry.IsDir() {
			return w.WriteHeader(&tar.Header{Name: path.Clean(name) + "/", Typeflag: tar.TypeDir, Mode: 0o755, ModTime: at, Format: tar.FormatPAX})
		}
		content, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content)), ModTime: at, Format: tar.FormatPAX}); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	return errors.Join(err, w.Close())
}
