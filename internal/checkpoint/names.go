package checkpoint

import (
	"encoding/hex"
	"fmt"
	"path"
	"strings"
)

// Names of the files in a checkpoint's directory.
const (
	// ReceiptFile is the name of the receipt, see [Receipt].
	ReceiptFile = "COMMIT.json"

	manifestPrefix = "manifest-"

	// partialSuffix ends the names of files that are being written. It is chosen by the
	// backends: object.Partial.
	partialSuffix = ".tmp"
)

// DataFile returns the name of the data file of a rank.
func DataFile(rank int) string { return fmt.Sprintf("r%05d"+dataSuffix, rank) }

// IndexFile returns the name of the index of a rank.
func IndexFile(rank int) string { return fmt.Sprintf("r%05d.idx", rank) }

// ManifestFile returns the name of the manifest with a digest.
func ManifestFile(digest Digest) string { return manifestPrefix + digest.String() }

// SumsFile returns the name of the file of sums of an adopted rank.
func SumsFile(rank int) string { return fmt.Sprintf("r%05d.sums", rank) }

// linkSuffix ends the names of files of earlier checkpoints that are linked in.
const linkSuffix = ".link"

// IsLink reports whether name is that of a file of an earlier checkpoint that is linked in.
func IsLink(name string) bool { return strings.HasSuffix(name, linkSuffix) }

// LinkName returns the name under which a file of a checkpoint is linked into later ones. A
// link keeps its name. So a file has one name in all checkpoints, and no two files have the
// same name.
func LinkName(ref Ref, name string) string {
	if IsLink(name) {
		return name
	}
	const most = 200 // with the rest, less than the longest name
	sum := Sum([]byte(ref.String() + "/" + name))
	return ref.Checkpoint[:min(len(ref.Checkpoint), most)] + "-" + hex.EncodeToString(sum[:8]) + linkSuffix
}

// attachedPrefix begins the names of files that were attached to a checkpoint after its
// commit. The name has the digest, so that another file of that name never replaces the file
// in the log.
const attachedPrefix = "attached-"

// AttachedFile returns the name of an attached file with a digest.
func AttachedFile(name string, digest Digest) string {
	return attachedPrefix + hex.EncodeToString(digest[:8]) + "-" + name
}

// dataSuffix ends the names of data files.
const dataSuffix = ".safetensors"

// HoldsData reports whether name is that of a file with bytes of tensors and values.
func HoldsData(name string) bool { return IsLink(name) || strings.HasSuffix(name, dataSuffix) }

// IsManifest reports whether name is that of a complete manifest.
func IsManifest(name string) bool {
	return strings.HasPrefix(name, manifestPrefix) && !strings.HasSuffix(name, partialSuffix)
}

// NameError reports a file of another format whose name is reserved for the store's own
// files.
type NameError struct{ Name string }

// Error reports the name of the file.
func (e *NameError) Error() string {
	return fmt.Sprintf("a file named %q cannot be kept in a checkpoint: the name is reserved for the store's own files", e.Name)
}

// ValidatePlainName returns an error for a name that a file of another format cannot have in
// a checkpoint's directory. For names that are reserved for the store's own files, the error
// is a [*NameError].
func ValidatePlainName(name string) error {
	if err := ValidateName(name); err != nil {
		return err
	}
	if name == ReceiptFile || IsManifest(name) || IsLink(name) || strings.HasSuffix(name, partialSuffix) ||
		strings.HasPrefix(name, attachedPrefix) || strings.HasSuffix(name, ".idx") || strings.HasSuffix(name, ".sums") || strings.HasSuffix(name, dataSuffix) {
		return &NameError{name}
	}
	return nil
}

// VerbatimSuffix ends the names of the data files of DCP. No index names such a file if it
// has no chunk.
const VerbatimSuffix = ".distcp"

// maxPath is the length in bytes of the longest path that Linux accepts.
const maxPath = 4096

// ValidatePath returns an error unless name is the clean absolute path of a file.
func ValidatePath(name string) error {
	switch {
	case len(name) > maxPath:
		return fmt.Errorf("path of %d bytes, at most %d are allowed", len(name), maxPath)
	case !path.IsAbs(name) || path.Clean(name) != name || name == "/":
		return fmt.Errorf("path %q of an adopted file is not absolute and clean", name)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("path %q has a NUL", name)
	}
	return nil
}
