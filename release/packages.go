package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // registers itself
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm" // registers itself
)

const description = `store of checkpoints for distributed training
The trainer runs jobs, ckptstore reads and manages stores. The service ckptstore
serves one store of the group ckptstore; it is not enabled by the installation.`

// packages makes a deb and an rpm for every processor. Both have the programs, a unit of
// systemd with its user, and the licence.
func (r *release) packages(context.Context) error {
	for _, format := range []string{"deb", "rpm"} {
		for _, arch := range r.arches {
			if err := r.pack(format, arch); err != nil {
				return fmt.Errorf("%s for %s: %w", format, arch, err)
			}
		}
	}
	return nil
}

// pack makes one package.
func (r *release) pack(format, arch string) (err error) {
	own := filepath.Join(r.root, "release", "files")
	file := func(mode os.FileMode, src, dst string) *files.Content {
		return &files.Content{Source: src, Destination: dst, FileInfo: &files.ContentFileInfo{Owner: "root", Group: "root", Mode: mode, MTime: r.date}}
	}
	licence := "/usr/share/doc/ckptstore/copyright"
	if format == "rpm" {
		licence = "/usr/share/licenses/ckptstore/LICENSE"
	}
	contents := files.Contents{
		file(0o644, filepath.Join(own, "ckptstore.service"), "/usr/lib/systemd/system/ckptstore.service"),
		file(0o644, filepath.Join(own, "sysusers.conf"), "/usr/lib/sysusers.d/ckptstore.conf"),
		file(0o644, filepath.Join(r.root, "LICENSE"), licence),
	}
	for _, name := range names {
		contents = append(contents, file(0o755, filepath.Join(r.bin(arch), name), "/usr/bin/"+name))
	}
	settings := file(0o644, filepath.Join(own, "default"), "/etc/default/ckptstore")
	settings.Type = files.TypeConfigNoReplace
	contents = append(contents, settings)
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: "ckptstore", Arch: arch, Platform: "linux", Version: r.version, VersionSchema: "none", Release: "1",
		Section: "utils", Priority: "optional", Maintainer: "ckptstore <noreply@ckptstore.invalid>", Vendor: "ckptstore",
		Description: description, License: "Apache-2.0", Homepage: "https://github.com/ckptstore/ckptstore", MTime: r.date,
		Overridables: nfpm.Overridables{
			Contents: contents, Umask: 0o022,
			Scripts: nfpm.Scripts{
				PostInstall: filepath.Join(own, "postinstall.sh"), PreRemove: filepath.Join(own, "preremove.sh"), PostRemove: filepath.Join(own, "postremove.sh"),
			},
			Depends: map[string][]string{"deb": {"libc6 (>= 2.17)"}, "rpm": {"glibc >= 2.17"}}[format],
			RPM:     nfpm.RPM{BuildHost: "localhost", Summary: "store of checkpoints for distributed training"},
		},
	})
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(r.out, packager.ConventionalFileName(info)))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	return packager.Package(info, out)
}
