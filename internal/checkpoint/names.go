package checkpoint

import (
	"encoding/hex"
	"fmt"
	"path"
	"strings"
)

// Names of the files in a checkpoint's directory.
const (
	// ReceiptFile is the name of the receipt.
	ReceiptFile = "COMMIT.json"

	manifestPrefix = "manifest-"

	// partialSuffix ends the names of files that are being written. Backends
	// choose it: it is object.Partial.
	partialSuffix = ".tmp"
)

func DataFile(rank int) string { return fmt.Sprintf("r%05d.safetensors", rank) }

func IndexFile(rank int) string { return fmt.Sprintf("r%05d.idx", rank) }

func ManifestFile(digest Digest) string { return manifestPrefix + digest.String() }

func SumsFile(rank int) string { return fmt.Sprintf("r%05d.sums", rank) }

// linkSuffix ends the name of a file of an earlier checkpoint that is linked
// in.
const linkSuffix = ".link"

func IsLink(name string) bool { return strings.HasSuffix(name, linkSuffix) }

// linkName is the name of a file of a checkpoint where it is linked in. One
// that is a link already keeps its name, so that a file has one name wherever
// it is, and no two files have the same.
func LinkName(ref Ref, name string) string {
	if IsLink(name) {
		return name
	}
	const most = 200 // with the rest, less than the longest name
	sum := Sum([]byte(ref.String() + "/" + name))
	return ref.Checkpoint[:min(len(ref.Checkpoint), most)] + "-" + hex.EncodeToString(sum[:8]) + linkSuffix
}

// attachedPrefix begins the names of files that were attached to a checkpoint
// after its commit. The digest is in the name, so that another file of that name
// never takes the place of the one that the log speaks of.
const attachedPrefix = "attached-"

func AttachedFile(name string, digest Digest) string {
	return attachedPrefix + hex.EncodeToString(digest[:8]) + "-" + name
}

const dataSuffix = ".safetensors"

// hasData reports the name of a file with bytes of tensors and values.
func HoldsData(name string) bool { return IsLink(name) || strings.HasSuffix(name, dataSuffix) }

func IsManifest(name string) bool {
	return strings.HasPrefix(name, manifestPrefix) && !strings.HasSuffix(name, partialSuffix)
}

// NameError says that a file of another format cannot have its name here.
type NameError struct{ Name string }

// Error names it.
func (e *NameError) Error() string {
	return fmt.Sprintf("a file named %q cannot be kept in a checkpoint: the store has files of such names", e.Name)
}

// plainName reports a name that a file of another format may not have in a
// checkpoint's directory.
func ValidatePlainName(name string) error {
	if err := ValidateName(name); err != nil {
		return err
	}
	if name == ReceiptFile || IsManifest(name) || IsLink(name) || strings.HasSuffix(name, partialSuffix) ||
		strings.HasPrefix(name, attachedPrefix) || strings.HasSuffix(name, ".idx") || strings.HasSuffix(name, ".sums") || strings.HasSuffix(name, ".safetensors") {
		return &NameError{name}
	}
	return nil
}

// verbatimSuffix ends the names of DCP's data files: one that no chunk is in holds
// nothing that anybody names.
const VerbatimSuffix = ".distcp"

// maxPath is the length in bytes of the longest path that Linux takes.
const maxPath = 4096

// ValidatePath reports what is not the clean absolute path of a file.
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
