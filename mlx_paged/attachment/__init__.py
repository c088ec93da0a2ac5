"""mlx-lm's own programs on paged blocks."""

from mlx_paged.attachment.attached_model import Attachment, AttachStats, attach

__all__ = ["AttachStats", "Attachment", "attach"]
